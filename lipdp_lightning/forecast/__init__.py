"""Provides forecasts, from public rows and before a run, of whether it will learn.

* ``public_rows``: made-up rows within what is declared, and files of public rows.
* ``public_training``: trains a copy of the network on them, in a few coarse steps with the plan's noise.
* ``forecasts``: the verdict.
"""

from .forecasts import Forecast, NoForecast, forecast
from .public_rows import PublicRows, read_public_rows

__all__ = ["Forecast", "NoForecast", "PublicRows", "forecast", "read_public_rows"]
