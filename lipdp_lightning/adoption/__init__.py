"""Projects of others under privacy: an ordinary LightningModule, or a plain loop of torch.

* ``privatize``: three lines that make a project on Lightning private.
* ``engine``: a loop over private steps without Lightning's Trainer.

How a project is understood:

* ``recorded_step``: a training step on made-up rows, and what it calls.
* ``certified_path``: the network from a row to the loss.
* ``torch_losses``: the certified forms of torch's loss functions.
* ``faithful_copy``: the comparison of a project's step with the private one.
* ``compiled_parts``: parts that are wrapped by torch.compile.

What it becomes:

* ``adopted_module``: a PrivateModule with the project's hooks.
* ``given_rows``: a data module of the project's rows.
* ``private_trainer``: a Trainer that takes the steps of a plan.
"""
