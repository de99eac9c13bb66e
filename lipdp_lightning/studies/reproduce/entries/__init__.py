"""Holds one module per table or figure, or per family of figures; each has `ENTRY` or `ENTRIES`."""
