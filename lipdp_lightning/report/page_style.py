"""Holds the style sheet of the HTML report: light and dark, one column on a telephone, printable."""

from __future__ import annotations

from lipdp_lightning.report.figure_style import COLOURS, DARK_COLOURS

__all__ = ["STYLE"]


def _variables(colours: object) -> str:
    return " ".join(f"--plot-{role}: {value};" for role, value in vars(colours).items())


STYLE = (
    f":root {{ color-scheme: light dark; {_variables(COLOURS)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK_COLOURS)} }} }}\n"
    """
:root {
  --page: #f3f5f9; --card: var(--plot-surface); --ink: var(--plot-ink); --muted: var(--plot-muted);
  --line: #dde3ec; --good: #00694d; --good-soft: #dff3ec; --bad: #a3260a; --bad-soft: #fde8e1;
  --warn: #7a4b00; --warn-soft: #fdf1d8; --accent: var(--plot-first); --track: #dfe5ee;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #11151d; --line: #2c3444; --good: #63d9b2; --good-soft: #12362d; --bad: #ff9c80;
    --bad-soft: #451c12; --warn: #f7c66b; --warn-soft: #3a2b0e; --track: #2c3444;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); line-height: 1.55;
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "DejaVu Sans", sans-serif;
}
main { max-width: 1440px; margin: 0 auto; padding: 2.5rem 1.25rem 3rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0; letter-spacing: -.015em; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .9rem; letter-spacing: -.01em; }
p { margin: .5rem 0; }
.eyebrow { color: var(--muted); font-size: .82rem; letter-spacing: .09em; text-transform: uppercase;
  margin: 0 0 .3rem; }
.when { color: var(--muted); font-size: .92rem; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 14px;
  padding: 1.3rem 1.5rem; min-width: 0; }
.hero { margin-top: 1.5rem; padding: 0; overflow: hidden; border-top: 6px solid var(--good); }
.hero.bad { border-top-color: var(--bad); background: var(--bad-soft); }
.hero.warn { border-top-color: var(--warn); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(230px, 1fr)); gap: 1.6rem;
  padding: 1.6rem 1.7rem 1.3rem; }
.fact .label { color: var(--muted); font-size: .88rem; margin: 0; }
.fact .value { font-size: 2.9rem; font-weight: 700; line-height: 1.12; letter-spacing: -.03em;
  margin: .1rem 0; }
.fact .detail { color: var(--muted); font-size: .9rem; margin: 0; }
.badge { display: inline-block; border-radius: 999px; padding: .28rem .85rem; font-weight: 650;
  font-size: .92rem; }
.badge.good { background: var(--good-soft); color: var(--good); }
.badge.bad { background: var(--bad); color: var(--card); }
.badge.warn { background: var(--warn-soft); color: var(--warn); }
.loud { color: var(--bad); font-size: 2.1rem; font-weight: 750; line-height: 1.15;
  letter-spacing: -.02em; margin: 0 0 .5rem; }
.meaning { border-top: 1px solid var(--line); padding: 1.2rem 1.7rem 1.4rem; display: grid;
  gap: .4rem 2.2rem;
  grid-template-columns: minmax(0, 1.7fr) minmax(0, 1fr); align-items: center; }
.meaning p { font-size: 1.06rem; margin: 0; max-width: 68ch; }
.meaning.wide { grid-template-columns: 1fr; }
.meter { font-size: .88rem; color: var(--muted); }
.meter .track { position: relative; height: 14px; border-radius: 7px; background: var(--track);
  margin: .35rem 0 .3rem; overflow: hidden; }
.meter .fill { position: absolute; inset: 0 auto 0 0; background: var(--accent); border-radius: 7px; }
.meter .ends { display: flex; justify-content: space-between; }
.meter strong { color: var(--ink); }
.caution { background: var(--warn-soft); color: var(--ink); border-left: 5px solid var(--warn);
  border-radius: 8px;
  padding: .8rem 1.1rem; margin: .9rem 0 0; }
.caution strong { color: var(--warn); }
.grid { display: grid; grid-template-columns: minmax(0, 1fr); gap: 0 1.1rem; align-items: start; }
.grid.plots { gap: 1.1rem; }
@media (min-width: 800px) { .grid { grid-template-columns: repeat(2, minmax(0, 1fr)); } }
@media (min-width: 1220px) { .grid.plots { grid-template-columns: repeat(3, minmax(0, 1fr)); } }
figure { margin: 0; padding: 1rem 1.1rem .9rem; }
figcaption { color: var(--muted); font-size: .9rem; margin-top: .35rem; }
svg.plot { display: block; width: 100%; height: auto; max-width: 640px; margin: 0 auto; }
svg.plot text { font-family: inherit !important; }
.scroll { overflow-x: auto; }
.scroll:focus-visible { outline: 2px solid var(--accent); outline-offset: 3px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--muted); font-weight: 600; border-bottom: 2px solid var(--line);
  vertical-align: bottom; }
th, td { padding: .42rem .9rem .42rem 0; }
td { border-bottom: 1px solid var(--line); vertical-align: top; overflow-wrap: anywhere; }
tbody th { color: var(--ink); font-weight: 500; border-bottom: 1px solid var(--line);
  vertical-align: top; }
tr:last-child > * { border-bottom: 0; }
thead tr:last-child > * { border-bottom: 2px solid var(--line); }
.number { text-align: right; white-space: nowrap; }
th:last-child, td:last-child { padding-right: 0; }
.layers td, .layers tbody th { white-space: nowrap; }
.layers thead .number { white-space: normal; }
.layers tbody th { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  font-size: .86rem; }
details { margin-top: 1rem; }
summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font: .84rem/1.5 ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace;
  margin: .9rem 0 0; }
footer { color: var(--muted); font-size: .86rem; margin-top: 2.2rem; }
@media (max-width: 720px) { .meaning { grid-template-columns: 1fr; } .fact .value { font-size: 2.3rem; } }
@media print { main { max-width: none; padding: 0; } .card { break-inside: avoid;
  } body { background: none; } }
"""
)
