"""Names the files of a run directory, for code that reads one without training in it."""

FORMAT = 3  # the format of run.json and of the files beside it
RUN_FILE = "run.json"
LEDGER_FILE = "ledger.json"
STEPS_FILE = "steps.txt"
STATISTICS_FILE = "statistics.npz"
CONFIG_FILE = "config.yaml"
PLAN_FILE = "plan.json"
PROGRESS_FILE = "progress.json"
REPORT_FILE = "privacy_report.json"
CHECKPOINTS = "checkpoints"
LAST = "last.ckpt"
