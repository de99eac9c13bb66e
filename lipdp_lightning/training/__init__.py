"""Training on Lightning: a module, a Strategy, and the files around a private step.

A step:

* ``private_steps``: the steps of a plan, for a Strategy or a plain loop: secret, ledger, record, release.
* ``strategy``: the Strategy, which connects Lightning's steps with the mechanism and adds the noise.
* ``module``: the LightningModule, and the loss that a plan clips.
* ``current_step``: the step that is under way, and the comparison with what set-up has checked.
* ``batches``: the rows of a micro-batch, and rows of zeros beside them.
* ``views``: several augmented views of each example.
* ``averaging``: averages of released weights.
* ``processes``: the processes of a run, and agreement among them.

Before the first step:

* ``settings``: the ``privacy`` group of a configuration.
* ``set_up``, ``model_checks``: every reason to refuse a run, found at once.
* ``context``: a digest of everything that decides a run's steps.

On disk:

* ``run_directory``, ``claim``: the files of a run, who may use them, and the checks before they are taken.
* ``step_record``: digests of what each step was released from.
* ``checkpoints``, ``checkpoint_files``: the state that a run continues from, and its files.
* ``loop_progress``: where Lightning's loops are after a number of steps.

Output of a run:

* ``public_numbers``: bounds and noise as rows of a table.
* ``predictions``: outputs of a module for held-out rows.
* ``withheld``: errors whose messages may tell about rows.
"""

from .module import PrivateModule
from .strategy import PrivateStrategy

__all__ = ["PrivateModule", "PrivateStrategy"]
