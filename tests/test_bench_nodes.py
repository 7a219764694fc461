"""``expertwire bench --nodes``: the host file and the command line, and ranks that mpirun starts."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from expertwire import cli
from expertwire.bench.adapters.prebuilt import NcclEpBench
from expertwire.bench.nodes import Nodes
from expertwire.bench.schema import Problem, Settings
from expertwire.errors import BackendError
from expertwire.groups import Group
from launching import mpirun, plain_environment

SMALL = ["-e", "8", "-t", "5", "-d", "128", "-k", "3", "-w", "1", "-i", "4"]


def run_cli(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Return the exit status of ``expertwire bench ...`` in this process."""
    monkeypatch.setattr(sys, "argv", ["expertwire", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
def open_mpi() -> str:
    """Skip without Open MPI and mpi4py; return the folder of the installation."""
    pytest.importorskip("mpi4py")
    if "--oversubscribe" not in mpirun(1) or (found := shutil.which("mpirun")) is None:
        pytest.skip("needs mpirun of Open MPI")
    return str(Path(found).parent.parent)


def test_ranks_are_spread_evenly() -> None:
    nodes = Nodes(("10.0.0.1", "10.0.0.2"))
    assert nodes.num_nodes == 2
    assert nodes.host_file(4) == "10.0.0.1\n10.0.0.1\n10.0.0.2\n10.0.0.2\n"


def test_the_command_line_names_what_was_asked_for() -> None:
    command = Nodes(("10.0.0.1",), "eth0", "/opt/mpi").command(3, Path("hosts"), ["program", "argument"])
    assert command[0] == "/opt/mpi/bin/mpirun"
    assert command[-2:] == ["program", "argument"]
    line = " ".join(command)
    for part in ("--hostfile hosts -np 3", "--prefix /opt/mpi", "btl_tcp_if_include eth0", "oob_tcp_if_include eth0"):
        assert part in line
    assert Nodes(("10.0.0.1",)).command(1, Path("hosts"), [])[0] == "mpirun"


REFUSED = {
    "no address": (["--nodes", " "], "--nodes: must be one or more addresses"),
    "no such host": (["--nodes", "nosuch.invalid"], "--nodes 'nosuch.invalid': cannot be resolved"),
    "IPv6": (["--nodes", "127.0.0.1 ::1"], "--nodes '::1': cannot be resolved to an IPv4 address"),
    "another host": (["--nodes", "127.0.0.1 192.0.2.77"], "--nodes: 192.0.2.77 is another host"),
    "no such interface": (["--nodes", "127.0.0.1", "--iface", "nosuch0"], "--iface 'nosuch0': must be among "),
    "no such MPI": (["--nodes", "127.0.0.1", "--mpi-prefix", "nosuch"], "--mpi-prefix nosuch: there is no bin/mpirun"),
    "threads": (["--nodes", "127.0.0.1", "--threads"], "--nodes: ranks over MPI are processes, not --threads"),
    "an interface alone": (["--iface", "lo"], "--iface lo: is for ranks over MPI, and needs --nodes"),
    "a prefix alone": (["--mpi-prefix", "/usr"], "--mpi-prefix /usr: is for ranks over MPI, and needs --nodes"),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_be_used_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    for dry_run in [], ["--dry-run"] if "192.0.2.77" not in said else []:
        assert run_cli(monkeypatch, *arguments, *dry_run) == 2
        printed = capsys.readouterr()
        assert said in printed.err
        assert (printed.out, printed.err.count("\n")) == ("", 1)


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["run", "dry-run"])
@pytest.mark.parametrize(
    ("lacking", "said"),
    [("mpi4py", "needs mpi4py"), ("mpirun", "needs mpirun of Open MPI"), ("", "is not of Open MPI")],
)
def test_what_this_host_lacks_ends_with_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    lacking: str,
    said: str,
    dry_run: list[str],
) -> None:
    monkeypatch.setattr("expertwire.bench.nodes.find_spec", lambda name: None if name == lacking else name)
    if lacking != "mpirun":
        (tmp_path / "mpirun").write_text("#!/bin/sh\necho another MPI\n", encoding="utf-8")
        (tmp_path / "mpirun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert run_cli(monkeypatch, "--device", "cpu", "--nodes", "127.0.0.1", *dry_run) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_dry_run_shows_hosts_and_command_even_of_other_hosts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = ["--nodes", "192.0.2.77 192.0.2.78", "--nproc-per-node", "4", "--iface", "lo"]
    assert run_cli(monkeypatch, *nodes, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert f"hosts: {'192.0.2.77 ' * 4}{'192.0.2.78 ' * 4}".strip() in printed
    assert "mpirun --hostfile hosts -np 8" in printed
    assert "R 8" in printed


@pytest.mark.parametrize("dry_run", [[], ["--dry-run"]], ids=["run", "dry-run"])
def test_ranks_that_are_threads_have_no_figures_over_mpi(
    open_mpi: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dry_run: list[str]
) -> None:
    assert open_mpi
    assert run_cli(monkeypatch, "--ep-lib", "expertwire-cpp", "--nodes", "127.0.0.1", *SMALL, *dry_run) == 0
    said = "its ranks are threads of one process, without MPI: leave --nodes out"
    assert f"expertwire-cpp: {'' if dry_run else 'no figures: '}{said}" in capsys.readouterr().out


MPIRUN = """#!/bin/sh
echo "$@" > {folder}/words
cat $2 > {folder}/hosts
echo "Dispatch (BF16): avg=12.50 us, min=12.1 us"
"""


@pytest.mark.parametrize("settings", [Settings(nccl_lib_path="/nccl"), Settings()], ids=["libraries", "none"])
def test_programs_of_others_run_where_it_was_asked_for(tmp_path: Path, settings: Settings) -> None:
    for name in ("bin/mpirun", "ep_bench"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(MPIRUN.format(folder=tmp_path), encoding="utf-8")
        path.chmod(0o755)
    nodes = Nodes(("127.0.0.1", "192.0.2.2"), "eth0", str(tmp_path))
    settings = replace(settings, device="cuda", nccl_ep_bench=str(tmp_path / "ep_bench"))
    assert NcclEpBench.obstacle(Problem(), settings, nodes) == ""
    assert NcclEpBench.obstacle(Problem(), settings, Nodes((), mpi_prefix="nosuch")).startswith("needs mpirun")
    samples = NcclEpBench.measure(Problem(num_ranks=4), settings, nodes)
    assert {phase: times.tolist() for phase, times in samples.items()} == {"dispatch-launch": [[12500]]}
    words = (tmp_path / "words").read_text(encoding="utf-8")
    assert f"-np 4 --bind-to none --prefix {tmp_path} --mca btl_tcp_if_include eth0" in words
    assert ("-x LD_LIBRARY_PATH=/nccl" in words) is bool(settings.nccl_lib_path)
    assert (tmp_path / "hosts").read_text(encoding="utf-8") == nodes.host_file(4)


def break_on_the_last_rank(group: Group) -> None:
    if group.rank == group.size - 1:
        raise ValueError("out of\nluck")
    group.barrier()


def test_what_a_rank_raises_is_told(open_mpi: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    with pytest.raises(BackendError, match="rank 1: ValueError: out of luck"):
        Nodes(("127.0.0.1",), mpi_prefix=open_mpi).run(2, break_on_the_last_rank)


SLEEPS = """
import os, sys, time
from expertwire.bench.adapters.prebuilt import NcclEpBench
from expertwire.bench.nodes import Nodes
from expertwire.bench.schema import Problem, Settings

def sleep(group, path):
    with open(f"{path}.{group.rank}", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(100)

if __name__ == "__main__":
    import sleeps
    Nodes(("127.0.0.1",), mpi_prefix=sys.argv[1]).run(2, sleeps.sleep, sys.argv[2])
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_no_rank_outlives_the_caller(open_mpi: str, tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS, encoding="utf-8")
    environment = plain_environment(PYTHONPATH=tmp_path)
    command = [sys.executable, tmp_path / "sleeps.py", open_mpi, tmp_path / "rank"]
    pids = [tmp_path / "rank.0", tmp_path / "rank.1"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as caller:
        until(lambda: all(path.exists() and path.read_text() for path in pids))
        caller.send_signal(how)
    until(lambda: not any(Path(f"/proc/{path.read_text()}").exists() for path in pids))


def until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_benchmark_over_mpi_from_end_to_end(open_mpi: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert open_mpi
    path = tmp_path / "out.json"
    nodes = ["--nodes", "127.0.0.1 127.0.0.1", "--ranks", "1", "--iface", "lo"]
    assert run_cli(monkeypatch, *nodes, *SMALL, "--json", str(path)) == 0
    (run,) = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert run["problem"]["num_ranks"] == 2
    assert [(result["lib"], result["status"]) for result in run["results"]] == [("expertwire", "ok"), ("floor", "ok")]
