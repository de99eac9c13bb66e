"""Malformed options, configurations and classes: each is refused in one line for each problem."""

from __future__ import annotations

from pathlib import Path

from command_runs import QUICKSTART

TEXT = Path(QUICKSTART).read_text()
NETWORK, LOSS = "--model.network", "--model.loss"
CROSS_ENTROPY = "lipdp_lightning.bounds.losses.CrossEntropy"
STEP_LR = "torch.optim.lr_scheduler.StepLR"

MODULES = {
    "bad_syntax.py": "def broken(:\n",
    "bad_import.py": "raise RuntimeError('first\\nsecond')\n",
    "bad_classes.py": """
import torch
from torch import nn


class Raises(nn.Module):
    def __init__(self, n: int = 1):
        super().__init__()
        raise RuntimeError("first\\nsecond")


class Misses(nn.Module):
    def __init__(self, n: int = 1):
        super().__init__()
        {}["missing"]


class Shaped(nn.Module):
    def __init__(self, kind: str = "positions"):
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(64, 20)

    def forward(self, x):
        y = self.layer(x.flatten(1))
        return {"positions": y.reshape(-1, 10, 2), "number": y.sum(1), "pair": (y, y)}[self.kind]


class Sized(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        if size > 10:
            raise RuntimeError("too large")


class Pair(nn.Module):
    def __init__(self, left: nn.Module, right: nn.Module):
        super().__init__()


class Optimizer(torch.optim.SGD):
    def __init__(self, params, lr: float = 0.1):
        raise KeyError("x")


def function(n: int = 1):
    return nn.Linear(64, 10)
""",
}

# options of `lipdp fit` -> what the refusal says
NUMBERS = {
    **{("--privacy.noise_multiplier", v): "noise_multiplier" for v in ("1e-300", "1e300", "1e-320", ".nan", "-1", "0")},
    **{("--privacy.batch_size", v): "batch_size" for v in ("1e-300", "1e-320", ".inf", ".nan", "-1", "0", "1e9", "x")},
    **{("--privacy.delta", v): "delta" for v in ("0", "1", "1e-400", "1e-320", ".nan", "-1", "2")},
    **{("--model.input_bound", v): "bound" for v in (".inf", "0", "1e-300", "1e300", ".nan", "-1")},
    **{("--privacy.max_norm", v): "max_norm" for v in (".inf", "0", "1e-300", "1e300", ".nan", "-1", "{}", "{a: -1}")},
    **{("--privacy.loss_clip", v): "loss_clip" for v in (".inf", "0", "1e-300", "1e300", ".nan", "-1")},
    **{("--privacy.scaling_floor", v): "scaling_floor" for v in (".inf", "0", "1e-300", "1e300", ".nan", "-1")},
    **{("--privacy.cotangent_clip", v): "cotangent_clip" for v in ('{"*": 1e-320}', '{"*": .nan}', "[]", "x")},
    **{("--privacy.physical_batch_size", v): "physical_batch_size" for v in ("0", "-1", "1e300", "x")},
    **{("--privacy.max_examples_per_unit", v): "max_examples_per_unit" for v in ("0", "-1", "99999")},
    **{("--privacy.steps", v): "steps" for v in ("1000000000000", "-1", "0", "1.5", "9" * 300)},
    **{("--privacy.steps", "null", "--privacy.epochs", v): "" for v in ("1e12", "1e300", ".inf", ".nan", "0", "-1")},
    **{
        ("--privacy.noise_multiplier", "null", "--privacy.epsilon", v): "epsilon"
        for v in ("1e-300", "1e-320", ".inf", ".nan", "0", "-1")
    },
    **{
        ("--privacy.allocation", "custom", "--privacy.group_weights", v): "group_weights"
        for v in ('{"*": .nan}', '{"*": -1}', '{"*": 1e300}', "{}", "x")
    },
    **{("--privacy.scaling", "radius", "--privacy.radius", v): "radius" for v in ("1e-320", "1e300", ".nan", "0")},
    **{("--privacy.method", "dpsgd_flat", "--privacy.clip_norm", v): "clip_norm" for v in ("1e-320", "1e300", ".nan")},
    **{("--optimizer.lr", v): "lr" if v == ".inf" else "optimizer" for v in (".nan", ".inf", "-1", "x")},
    **{
        ("--privacy.max_norm", v, "--privacy.free_layers", "[x]"): "the pattern 'x' matches no layer"
        for v in ("null", "1.0")
    },
    ("--seed_everything", "-1"): "seed_everything",
}

TRAINER = {
    **{("--trainer.devices", v): "devices" for v in ("-3", "0", "x", "[0,1]", "[]", "1.5", "99999", "")},
    **{("--trainer.num_nodes", v): "num_nodes" for v in ("0", "-1", "x")},
    **{("--trainer.accelerator", v): "" for v in ("gpu", "tpu", "nonsense", "7")},
    **{("--trainer.strategy", v): "strategy" for v in ("fsdp", "deepspeed", "nonsense")},
    **{
        ("--trainer.precision", v): "precision"
        for v in ("16-true", "bf16-true", "16-mixed", "16", "transformer-engine", "nonsense", "8")
    },
    **{("--trainer.max_steps", v): "" for v in ("-5", "3", "x")},
    **{("--trainer.max_epochs", v): "" for v in ("-7", "99", "x")},
    **{("--trainer.limit_train_batches", v): "limit_train_batches" for v in ("0", "2.5", "-1")},
    **{("--trainer.limit_val_batches", v): "limit_val_batches" for v in ("1e-320", "0.1", "1.5", "-1")},
    ("--trainer.limit_test_batches", "0.1"): "limit_test_batches",
    **{("--trainer.accumulate_grad_batches", v): "accumulate_grad_batches" for v in ("0", "-1", "2")},
    **{("--trainer.gradient_clip_val", v): "gradient_clip_val" for v in ("-1", ".nan", "x")},
    **{("--trainer.val_check_interval", v): "val_check_interval" for v in ("0", "1.5", "-1", "0.0")},
    **{("--trainer.fast_dev_run", v): "fast_dev_run" for v in ("-1", "true")},
    **{("--trainer.overfit_batches", v): "overfit_batches" for v in ("-1", "1")},
    **{("--trainer.check_val_every_n_epoch", v): "check_val_every_n_epoch" for v in ("0", "-1")},
    **{("--trainer.log_every_n_steps", v): "log_every_n_steps" for v in ("-1", "x")},
    ("--trainer.barebones", "true"): "barebones",
    ("--trainer.detect_anomaly", "true"): "detect_anomaly",
    ("--trainer.logger", "x"): "trainer.logger",
    ("--trainer.callbacks", "x"): "trainer.callbacks",
    ("--trainer.callbacks", "[1]"): "trainer.callbacks",
    ("--trainer.profiler", "x"): "profiler",
    ("--trainer.plugins", "x"): "trainer.plugins",
    ("--trainer.max_time", "x"): "duration",
    ("--trainer.num_sanity_val_steps", "-5"): "num_sanity_val_steps",
    ("--trainer.gradient_clip_algorithm", "x"): "gradient_clip_algorithm",
    ("--trainer.min_steps", "5", "--trainer.max_steps", "1"): "min_steps",
    ("--trainer", "x"): "trainer",
}

OUTPUTS = {
    (f"{NETWORK}.init_args.outputs", "9"): "the network has 9 outputs, and Digits declares 10 classes",
    (f"{NETWORK}.init_args.outputs", "1"): "the network has 1 output, and Digits declares 10 classes",
    (f"{NETWORK}.init_args.outputs", "1", LOSS, "hinge"): "the network has 1 output",
    (f"{NETWORK}.init_args.outputs", "-1"): "model.network",
    (LOSS, "binary_cross_entropy"): "BinaryCrossEntropy is for binary, and Digits declares 10 classes",
    (LOSS, "binary_cross_entropy", f"{NETWORK}.init_args.outputs", "1"): "BinaryCrossEntropy is for binary",
    (LOSS, "huber"): "Huber is for regression, and Digits declares 10 classes",
    (LOSS, "squared_error"): "SquaredError is for regression",
    (LOSS, CROSS_ENTROPY, f"{LOSS}.init_args.class_weights", "[1, 2]"): "2 numbers for 10 outputs",
    (NETWORK, "bad_classes.Shaped"): "(batch, 10, 2)",
    (NETWORK, "bad_classes.Shaped", f"{NETWORK}.kind", "number"): "one number for each example",
    (NETWORK, "bad_classes.Shaped", f"{NETWORK}.kind", "pair"): "does not return one tensor",
    (NETWORK, "bad_classes.Shaped", f"{NETWORK}.kind", "nothing"): "forward",
}


def _sized(side: str, size: int | tuple[int, int]) -> tuple[str, str]:
    """The options for one side of a pair: a module of that size, or a pair of two."""
    one = "{{class_path: bad_classes.Sized, init_args: {{size: {}}}}}".format
    if isinstance(size, int):
        return f"{NETWORK}.{side}", one(size)
    halves = f"{{left: {one(size[0])}, right: {one(size[1])}}}"
    return f"{NETWORK}.{side}", f"{{class_path: bad_classes.Pair, init_args: {halves}}}"


CLASSES = {
    (NETWORK, "nowhere.Net"): "model.network: nowhere.Net",
    (NETWORK, "lipdp_lightning.models.Nowhere"): "model.network: lipdp_lightning.models.Nowhere",
    (NETWORK, "bad_syntax.Net"): "model.network: bad_syntax.Net cannot be imported, SyntaxError",
    (NETWORK, "bad_import.Net"): "model.network: bad_import.Net cannot be imported, RuntimeError: first second",
    (NETWORK, "bad_classes.Raises"): "model.network: Raises cannot be made, RuntimeError: first second",
    (NETWORK, "bad_classes.Misses"): "model.network: Misses cannot be made, KeyError",
    **{
        (
            NETWORK,
            "bad_classes.Pair",
            *_sized("left", left),
            *_sized("right", right),
        ): f"model.network.init_args.{where}: "
        for where, left, right in (("left", 11, 1), ("right", 1, 11), ("left.init_args.right", (1, 12), 11))
    },
    (NETWORK, "bad_classes.function"): "model.network",
    (NETWORK, "torch.optim.SGD"): "model.network",
    (NETWORK, "torch.nn.Linear"): "in_features, out_features",
    (NETWORK, "3"): "model.network",
    (f"{NETWORK}.init_args.output", "3"): "did you mean outputs?",
    (f"{NETWORK}.init_args.outputs", "x"): "model.network.init_args.outputs: 'x' is not a whole number",
    (LOSS, "nowhere"): "loss 'nowhere' is unknown",
    (LOSS, "torch.nn.MSELoss"): "MSELoss",
    (LOSS, CROSS_ENTROPY, f"{LOSS}.init_args.temperature", "-1"): "model.loss: temperature=-1.0",
    (LOSS, CROSS_ENTROPY, f"{LOSS}.init_args.class_weights", "[.nan]"): "model.loss: class_weights",
    ("--data", "nowhere.Rows"): "data: nowhere.Rows",
    ("--data", "data_modules.Nowhere"): "data: data_modules.Nowhere",
    ("--data", "data_modules.Digitz"): "did you mean data_modules.Digits?",
    (NETWORK, "lipdp_lightning.models.MLPP"): "did you mean lipdp_lightning.models.MLP?",
    ("--data", "torch.nn.Linear"): "data: ",
    ("--data", "bad_syntax.Rows"): "data: bad_syntax.Rows cannot be imported",
    ("--data", "data_modules.CSVTable"): "path, schema",
    ("--data.init_args.folder", "x"): "known are validation_fraction",
    ("--data.init_args.validation_fraction", "x"): "data.init_args.validation_fraction",
    ("--data.init_args.validation_fraction", "2"): "validation_fraction",
    ("--data.init_args.validation_fraction", ".nan"): "validation_fraction",
    ("--data", "{class_path: data_modules.CSVTable, init_args: {path: /a, schema: {rows: x}}}"): "rows is 'x'",
    ("--optimizer", "nowhere.Adam"): "optimizer: nowhere.Adam",
    ("--optimizer", "torch.nn.Linear"): "optimizer: ",
    ("--optimizer", "bad_classes.Optimizer"): "the optimizer cannot be made: KeyError",
    ("--optimizer.rate", "1"): "optimizer",
    ("--optimizer", "torch.optim.SparseAdam"): "SparseAdam takes sparse gradients",
    ("--lr_scheduler", "nowhere.Step"): "lr_scheduler: nowhere.Step",
    ("--lr_scheduler", STEP_LR): "step_size",
    ("--lr_scheduler", STEP_LR, "--lr_scheduler.step_size", "x"): "lr_scheduler.init_args.step_size",
    ("--lr_scheduler", STEP_LR, "--lr_scheduler.step_size", "0"): "the schedule fails",
    (
        "--lr_scheduler",
        STEP_LR,
        "--lr_scheduler.step_size",
        "1",
        "--lr_scheduler.gamma",
        ".nan",
    ): "the rate becomes [nan]",
    ("--lr_scheduler", "torch.optim.lr_scheduler.OneCycleLR", "--lr_scheduler.max_lr", "1"): "lr_scheduler.init_args",
    ("--lr_scheduler", "torch.optim.lr_scheduler.ReduceLROnPlateau"): "none is named",
    ("--trainer.callbacks", "[{class_path: nowhere.Call}]"): "trainer.callbacks: nowhere.Call",
    ("--trainer.callbacks", "[{class_path: callbacks.PrivateValidationCurves}]"): "epsilon",
    ("--trainer.callbacks", "[{class_path: bad_import.Call}]"): "trainer.callbacks: bad_import.Call cannot be imported",
    (
        "--trainer.callbacks",
        "[{class_path: callbacks.AugmentationMultiplicity, init_args: {views: 2, augmentations: [nowhere.A]}}]",
    ): "nowhere.A",
    ("--trainer.logger", "nowhere.Log"): "trainer.logger: nowhere.Log",
    ("--trainer.logger", "{class_path: lightning.pytorch.loggers.CSVLogger}"): "save_dir",
}

KEYS = {
    ("--nothing", "1"): "nothing",
    ("--privacy.epsilo", "1"): "did you mean privacy.epsilon?",
    ("--privacy", "3"): "privacy",
    ("--model", "[1]"): "model",
    ("--privacy.epsilon.x", "3"): "privacy.epsilon",
    ("stray",): "stray",
    ("--lr_interval", "x"): "lr_interval",
    ("--privacy.delta", "-1e-5"): "--key=-1",
    ("--config", "/nowhere.yaml"): "there is no such file",
    ("--config", "/"): "it is not a file",
    ("--json",): "json",
    ("--wandb", "sometimes"): "sometimes",
    ("--run_dir", ""): "argument --run_dir/--run-dir: the value is empty",
    ("--run_dir", "x" * 3000): "File name too long",
    ("--run_dir", "a\nb\n" + "x" * 300): "a b xxx",
}

_BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
# the content of a configuration -> what the refusal says
FILES: dict[str, tuple[bytes, str]] = {
    name: (text.encode() if isinstance(text, str) else text, expected)
    for name, (text, expected) in {
        "a tab": (TEXT.replace("  epsilon", "\tepsilon"), "a tab, where YAML wants spaces"),
        "indentation": (TEXT.replace("  delta", "   delta"), "line 18"),
        "a group twice": (TEXT + "privacy:\n  epsilon: 4\n", "'privacy' is given twice"),
        "a key twice": (TEXT.replace("  epochs: 30", "  epochs: 30\n  epochs: 40"), "'epochs' is given twice"),
        "an unknown key": (TEXT.replace("epsilon:", "epslon:"), "did you mean privacy.epsilon?"),
        "an unknown group": (TEXT + "privcy:\n  epsilon: 4\n", "did you mean privacy"),
        "a list for a mapping": (TEXT.replace("privacy:\n", "privacy: [1]\nother:\n"), ""),
        "empty": ("", "it is empty"),
        "a comment": ("# nothing\n", "it is empty"),
        "binary": (b"\x00\x01\xff\xfe" * 100, "not UTF-8 text"),
        "zero bytes": (b"a: 1\0\n", "zero bytes"),
        "a word": ("hello", "not a mapping"),
        "a list": ("- a\n- b\n", "not a mapping"),
        "Latin-1": (TEXT.encode() + b"# \xe9\n", "line 31 is not UTF-8 text"),
        "UTF-16": (TEXT.encode("utf-16"), "not UTF-8 text"),
        "a long number": (TEXT.replace("epsilon: 3.0", "epsilon: " + "9" * 400), "a number of 400 digits"),
        "a longer number": (TEXT.replace("size: 256", "size: " + "9" * 5000), "a number of 5000 digits"),
        "a large number": (TEXT.replace("epsilon: 3.0", "epsilon: 1e400"), "epsilon"),
        "an open list": (TEXT + "other: [1, 2\n", "is not YAML"),
        "a tag": (TEXT + "other: !!python/object/apply:os.system [echo]\n", "tag"),
        "two documents": (TEXT + "---\na: 1\n", "another document"),
        "an unknown alias": (TEXT + "other: *x\n", "alias"),
        "aliases that grow": (_BOMB, "aliases stand for more values"),
        "an alias of itself": ("a: &a [*a]\n", "aliases stand for more values"),
        "deep nesting": ("a: " + "[" * 5000 + "]" * 5000, "too deeply"),
        "a large file": ("# " + "x" * (5 << 20), "larger than 1 MB"),
    }.items()
}

CONFIG = ("--config", QUICKSTART)
RUN = ("--dataset-size", "1797", "--batch-size", "256", "--delta", "1e-4", "--steps", "10")
ECDF = ("ecdf", "--data", "rows.csv", "--column", "v", "--epsilon", "1", "--range=0,1", "--output", "out")
TUNE = (*CONFIG, "--out", "out")
SUBMIT = (*CONFIG, "--dry-run", "--no-check")
# these prepare a whole training first
SLOW = [
    ("audit", *CONFIG, f"{NETWORK}.init_args.outputs", "9"),
    ("tune", *TUNE, "--objective", "x"),
]
# the words of another command
COMMANDS: list[tuple[str, ...]] = [
    ("nothing",),
    ("fit",),
    ("fit", "--config"),
    ("certify",),
    ("certify", "--config", "/nowhere.yaml"),
    ("certify", *CONFIG, "--attack", "-1"),
    ("certify", *CONFIG, "--attack", "x"),
    ("certify", *CONFIG, "--attack", "1000000000000"),
    ("certify", *CONFIG, "--seed", "-1"),
    ("certify", *CONFIG, "--run_dir", "x"),
    ("certify", *CONFIG, NETWORK, "bad_syntax.Net"),
    ("certify", *CONFIG, f"{NETWORK}.init_args.outputs", "9"),
    ("audit",),
    ("audit", "--config", "/nowhere.yaml"),
    ("audit", *CONFIG, "--confidence", "2"),
    ("audit", *CONFIG, "--confidence", "nan"),
    ("audit", *CONFIG, "--seed", "-1"),
    ("audit", *CONFIG, "--suite", "x"),
    ("test",),
    ("test", "--run_dir", "/nowhere"),
    ("test", "--run_dir", "."),
    ("export",),
    ("export", "--run_dir", "/nowhere", "--output", "x"),
    ("report", "--run_dir", "/nowhere"),
    ("status", "/nowhere"),
    ("status", ".", "."),
    ("tune", *CONFIG),
    ("tune", "--config", "/nowhere.yaml", "--out", "out"),
    ("tune", *TUNE, "--trials", "0"),
    ("tune", *TUNE, "--seed", "-1"),
    ("tune", *TUNE, "--score-noise", "nan"),
    ("tune", *TUNE, "--privacy.epsilon", "nan"),
    ("tune", *TUNE, f"{NETWORK}.class_path", "bad_syntax.Net"),
    ("tune", *TUNE, "stray"),
    ("reproduce",),
    ("reproduce", "nothing"),
    ("reproduce", "--jobs", "0", "table"),
    ("submit",),
    ("submit", "--config", "/nowhere.yaml"),
    ("submit", *SUBMIT, "--nodes", "0"),
    ("submit", *SUBMIT, "--array", "x"),
    ("submit", *SUBMIT, "--array", "seeds="),
    ("submit", *SUBMIT, "--time", "soon"),
    ("submit", *SUBMIT, "--site", "/nowhere"),
    ("submit", *SUBMIT, "--", "--trainer.devices", "{"),
    ("submit", *CONFIG, "--dry-run", "--", "--privacy.epsilon", "nan"),
    ("bench", "--model", "nothing"),
    ("bench", "--contender", "nothing"),
    ("bench", "--repeats", "0"),
    ("bench", "--threads", "x"),
    ("bench", "--device", "tpu"),
    ("bench", "--memory-limit", "nan"),
    ("bench", "--certificate", "--update-size", "nan"),
    ("bench", "--check", "/nowhere"),
    ("curves",),
    ("curves", "nothing"),
    ("curves", "simulate"),
    ("curves", "compare", "--levels", "99"),
    ("curves", "compare", "--epsilon", "nan"),
    ("budget",),
    ("budget", *RUN),
    *(("budget", *RUN, "--epsilon", v) for v in ("1e-300", "1e-320", "nan", "0", "-1", "inf", "1e300", "x")),
    *(("budget", *RUN, "--noise-multiplier", v) for v in ("1e-300", "1e300", "nan", "-1")),
    *(("budget", *RUN, "--epsilon", "3", "--delta", v) for v in ("0", "1", "1e-400", "1e-320", "nan")),
    *(("budget", *RUN, "--epsilon", "3", "--batch-size", v) for v in ("1e-320", "nan", "1e9")),
    *(("budget", *RUN, "--epsilon", "3", "--steps", v) for v in ("0", "1000000000000", "x")),
    *(("budget", *RUN, "--epsilon", "3", "--dataset-size", v) for v in ("0", "x", "1" + "0" * 400)),
    ("budget", *RUN, "--epsilon", "3", "--accountant", "x"),
    *(("curves", *ECDF, "--epsilon", v) for v in ("1e-320", "1e-300", "nan", "0", "inf")),
    *(("curves", *ECDF, "--delta", v) for v in ("nan", "1", "-1")),
    *(("curves", *ECDF, "--levels", v) for v in ("0", "99", "x")),
    *(("curves", *ECDF, "--base", v) for v in ("0", "1", "100000000000")),
    *(("curves", *ECDF, "--confidence", v) for v in ("0", "1", "nan", "0.9999999999")),
    *(("curves", *ECDF, f"--range={v}") for v in ("1,0", "nan,1", "-1e308,1e308", "0,1e-320", "x")),
    ("curves", *ECDF, "--column", "nothing"),
    ("curves", *ECDF, "--output", ""),
    ("tune", *CONFIG, "--out", ""),
    ("audit", *CONFIG, "--out", ""),
    ("submit", *SUBMIT, "--run_dir", ""),
    ("status", ""),
    ("report", "--run_dir", ""),
    ("report", "--run_dir", "x" * 5000),
    ("report", "--run_dir", "first\nlipdp: second"),
    ("submit", *SUBMIT, "--config", "a\nb"),
    ("status", "a/" * 2500),
    ("curves", *ECDF, "--data", "x" * 300),
    ("curves", *ECDF, "--data", "/nowhere"),
    ("curves", *ECDF, "--delimiter", ""),
    ("curves", *ECDF, "--quantiles", "2"),
]

TABLES: dict[str, bytes] = {
    "ragged": b"v,y\n1,2,3\n",
    "no rows": b"v,y\n",
    "NaN": b"v,y\nnan,1\n",
    "too large": b"v\n1e400\n",
    "empty": b"",
    "binary": b"\x00\xff",
    "UTF-16": "v\n1\n".encode("utf-16"),
    "a long number": b"v\n" + b"9" * 5000 + b"\n",
}
