"""How the files of a run directory are called, for whoever reads one without training in it."""

FORMAT = 3  # of run.json, and of what it says is beside it
RUN_FILE = "run.json"
LEDGER_FILE = "ledger.json"
STEPS_FILE = "steps.txt"
STATISTICS_FILE = "statistics.npz"
CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
REPORT_FILE = "privacy_report.json"
CHECKPOINTS = "checkpoints"
LAST = "last.ckpt"
