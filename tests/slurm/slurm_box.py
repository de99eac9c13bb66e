"""A Slurm cluster of one machine: a controller and virtual nodes on loopback, in one folder, without accounting."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "scancel", "sinfo")
NODES = 4  # jobs are preempted on the last two alone
CPUS = 8


def missing() -> str | None:
    """Why no cluster can be started here."""
    absent = [name for name in PROGRAMS if _program(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "slurmd has to be started by root"


def _program(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


def _free_ports(count: int) -> list[int]:
    opened = [socket.socket() for _ in range(count)]
    try:
        for one in opened:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in opened]
    finally:
        for one in opened:
            one.close()


class Box:
    """Partitions: ``main`` on two nodes; ``low`` and ``high`` share two others, and high takes them from low."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "WANDB"))}
        self.environment |= {"SLURM_CONF": str(folder / "slurm.conf"), "MASTER_ADDR": "127.0.0.1"}

    # ---- daemons

    def start(self) -> None:
        for name in ("munge", "state", "log"):
            (self.folder / name).mkdir(parents=True)
        self.folder.chmod(0o755)
        (self.folder / "munge").chmod(0o755)
        key = self.folder / "munge" / "key"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o400)
        self._write_settings()
        munge = self.folder / "munge"
        self._daemon(
            "munged", "--foreground", "--force", f"--key-file={key}", f"--socket={munge / 'socket'}",
            f"--pid-file={munge / 'pid'}", f"--log-file={munge / 'log'}", f"--seed-file={munge / 'seed'}",
        )  # fmt: skip
        self.wait(lambda: (munge / "socket").exists(), 20, "munged's socket")
        self._daemon("slurmctld", "-D", "-c")
        for node in range(1, NODES + 1):
            (self.folder / f"spoolbox{node}").mkdir()
            self._daemon("slurmd", "-D", "-c", "-N", f"box{node}")
        self.wait(lambda: set(self.run("sinfo", "-h", "-o", "%T").split()) == {"idle"}, 60, "idle nodes")

    def _write_settings(self) -> None:
        controller, *ports = _free_ports(NODES + 1)
        settings = {
            "ClusterName": "box",
            "SlurmctldHost": "localhost(127.0.0.1)",
            "SlurmctldPort": controller,
            "SlurmUser": "root",
            "AuthType": "auth/munge",
            "CredType": "cred/munge",
            # credentials that last would hold a requeue back for two minutes
            "AuthInfo": f"socket={self.folder / 'munge' / 'socket'},cred_expire=5",
            "CommunicationParameters": "NoCtldInAddrAny,NoInAddrAny",
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "slurmd-%n.pid",
            "SlurmctldLogFile": self.folder / "log" / "slurmctld",
            "SlurmdLogFile": self.folder / "log" / "slurmd-%n",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "JobCompType": "jobcomp/none",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "SchedulerParameters": "batch_sched_delay=0,sched_interval=1,bf_interval=1",
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "SlurmctldParameters": "preempt_send_user_signal",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": 2,
            "KillWait": 10,
        }
        lines = [f"{name}={value}" for name, value in settings.items()]
        host = socket.gethostname().split(".")[0]
        lines += [
            f"NodeName=box{i} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CPUS} RealMemory=2000"
            for i, port in enumerate(ports, start=1)
        ]
        lines += [
            "PartitionName=main Nodes=box[1-2] Default=YES PriorityTier=1",
            "PartitionName=low Nodes=box[3-4] PriorityTier=1 PreemptMode=REQUEUE GraceTime=20",
            "PartitionName=high Nodes=box[3-4] PriorityTier=10 PreemptMode=OFF",
        ]
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.folder / "cgroup.conf").write_text("")

    def _daemon(self, name: str, *arguments: str) -> None:
        program = _program(name)
        assert program is not None
        with open(self.folder / "log" / f"{name}{len(self._daemons)}.out", "wb") as out:
            # of a session of its own: Ctrl-C at a test must leave it alive until stop()
            started = subprocess.Popen(
                [program, *arguments], env=self.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                start_new_session=True,
            )  # fmt: skip
        self._daemons.append(started)

    def stop(self) -> None:
        """Cancel what still runs, then end the daemons that were started, the last one first."""
        if len(self._daemons) > 1:
            subprocess.run(["scancel", "--user=root"], env=self.environment, capture_output=True, timeout=30)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline and self._busy():
                time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(15)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _busy(self) -> bool:
        asked = subprocess.run(["squeue", "-h"], env=self.environment, capture_output=True, text=True, timeout=30)
        return bool(asked.stdout.strip())

    # ---- jobs

    def run(self, *words: str, **more: str) -> str:
        """A client's output; what it complains about is an error."""
        done = subprocess.run(
            words, env={**self.environment, **more}, capture_output=True, text=True, timeout=120, cwd=self.folder
        )
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}{done.stdout}"
        return done.stdout

    def show(self, job: str) -> dict[str, str]:
        """What the controller knows of a job."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "--oneliner", "show", "job", job)))

    def state(self, job: str) -> str:
        return self.show(job)["JobState"]

    def wait(self, done: Callable[[], object], seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while True:
            try:
                if done():
                    return
            except (AssertionError, OSError):
                if time.monotonic() > deadline:
                    raise
            assert time.monotonic() < deadline, f"no {what} after {seconds} s"
            time.sleep(0.25)

    def wait_for_end(self, job: str, seconds: float = 240) -> str:
        """The state of a job that neither runs nor waits any more."""
        waiting = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED")
        self.wait(lambda: self.state(job) not in waiting, seconds, f"end of job {job}")
        return self.state(job)
