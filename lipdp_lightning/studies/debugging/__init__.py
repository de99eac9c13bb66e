"""Training functions with and without the mistakes that paper 002 looks for, and networks to try its tests on."""
