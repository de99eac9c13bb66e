"""Training on Lightning: a module, a Strategy, and what stands around a private step.

A step:

* ``strategy``: where noise enters, between Lightning's funnel of steps and the mechanism
* ``module``: the LightningModule, and the loss that a plan clips
* ``current_step``: what is kept and compared while a step lasts
* ``batches``: which rows a micro-batch has, and how many the network is given
* ``views``: several augmented views of each example
* ``averaging``: averages of released weights
* ``processes``: the processes of a run, and what they agree on

Before the first step:

* ``settings``: the ``privacy`` group of a configuration
* ``set_up``, ``model_checks``: every reason to refuse a run, found at once
* ``context``: what the noise of a run belongs to

On disk:

* ``run_directory``: what a run's directory holds, and who may use it
* ``step_record``: what each step was released from
* ``checkpoints``, ``checkpoint_files``: what a run continues from, and the files that hold it

What a run shows:

* ``public_numbers``: bounds and noise as rows of a table
* ``predictions``: what a module puts out on held-out rows
* ``withheld``: errors whose messages may tell about rows
"""

from .module import PrivateModule
from .strategy import PrivateStrategy

__all__ = ["PrivateModule", "PrivateStrategy"]
