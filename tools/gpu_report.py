"""Gathers what tools/gpu_check.sh has run into one JSON file, and prints a short table of it.

    python3 tools/gpu_report.py RESULTS OUTPUT.json "command line"

RESULTS holds, for each group of tests, NAME.status (exit status and seconds), and NAME.jsonl (a line when a test begins
and when it ends, by tests/gpu_suite.py) or NAME.xml (by ctest). The exit status is 0 if something passed and nothing
failed, hung or died.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from expertwire.info import collect

#: Statuses after all tests of a group: all passed, some failed, none selected; of ctest: some failed.
_TOLD = (0, 1, 5, 8)
#: Of the timeout command: pytest has ended when it was asked to, or had to be killed.
_INTERRUPTED = 124
_OUT_OF_TIME = (_INTERRUPTED, 137)


@dataclass
class Run:
    """One group of the tests.

    Attributes:
        name: of the group.
        seconds: how long it took.
        problem: why its results are not complete; empty if they are.
        passed: number of tests.
        failures: test to the first line of what it failed with.
        skipped: reason to number of tests.
        slowest: test to seconds, the slowest three.
    """

    name: str
    seconds: int
    problem: str
    passed: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    slowest: dict[str, float] = field(default_factory=dict)


def lines_of(status_file: Path) -> list[dict[str, Any]]:
    """Returns what is known of the tests of one group, as gpu_suite.py tells it."""
    journal, by_ctest = status_file.with_suffix(".jsonl"), status_file.with_suffix(".xml")
    if journal.exists():
        return [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    if not by_ctest.exists():
        return []
    lines = []
    root = ElementTree.parse(by_ctest).getroot()  # noqa: S314 (made by ctest, here)
    for case in root.iter("testcase"):
        skipped, failure = case.find("skipped"), case.find("failure")
        line = {"test": case.attrib["name"], "outcome": "passed", "seconds": round(float(case.attrib["time"]), 3)}
        if skipped is not None and skipped.get("message", "").startswith("SKIP_RETURN_CODE"):
            line |= {"outcome": "skipped", "text": (case.findtext("system-out") or "").partition("\n")[0]}
        elif skipped is not None or failure is not None:  # a program that cannot be started counts as skipped there
            line |= {"outcome": "failed", "text": (failure if skipped is None else skipped).get("message", "")}
        lines.append(line)
    return lines


def read_run(status_file: Path) -> Run:
    """Returns what one group did."""
    status, seconds = map(int, status_file.read_text(encoding="ascii").split())
    problem = "" if status in _TOLD else "out of time" if status in _OUT_OF_TIME else f"ended with status {status}"
    run = Run(status_file.stem, seconds, problem)
    lines = lines_of(status_file)
    if not lines:
        run.problem = problem or "left no results"
    ended: dict[str, dict[str, Any]] = {}
    for line in lines:
        if "test" in line and ended.get(line["test"], {}).get("outcome") != "failed":
            ended[line["test"]] = line
    last = next((line for line in reversed(lines) if "test" in line), {})
    if status == _INTERRUPTED and last.get("outcome") == "began":  # neither passed nor failed
        del ended[last["test"]]
        run.problem += f" in {last['test']}"
    for test, line in ended.items():
        if line["outcome"] == "passed":
            run.passed += 1
        elif line["outcome"] == "skipped":
            run.skipped[line["text"]] = run.skipped.get(line["text"], 0) + 1
        else:
            text = line.get("text", "hung, or ended the process").strip() or "failed"
            run.failures[test] = text.partition("\n")[0][:300]
    by_time = sorted(ended.items(), key=lambda item: -item[1].get("seconds", 0.0))
    run.slowest = {test: line["seconds"] for test, line in by_time[:3] if "seconds" in line}
    return run


def output_of(*command: str) -> str:
    """Returns what a command prints, or nothing where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return ""
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout.strip()


def describe() -> dict[str, Any]:
    """Returns the machine, its GPUs and driver, and the versions of what takes part."""
    info = collect().as_json()
    driver = output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").splitlines()
    return {
        "machine": info["machine"],
        "gpus": info["gpus"]["names"],
        "driver": driver[0] if driver else "",
        "driver_cuda": info["gpus"]["driver_cuda"],
        "backends": info["backends"],
        "versions": info["versions"],
        "commit": output_of("git", "rev-parse", "HEAD"),
        "uncommitted_changes": bool(output_of("git", "status", "--porcelain")),
    }


def show(runs: list[Run], facts: dict[str, Any]) -> None:
    """Prints failures, then the table."""
    for run in runs:
        for test, text in run.failures.items():
            print(f"FAILED {test}: {text}")
    print(f"{'':12}{'passed':>8}{'failed':>8}{'skipped':>9}{'seconds':>9}")
    for run in runs:
        counts = f"{run.passed:8}{len(run.failures):8}{sum(run.skipped.values()):9}{run.seconds:9}"
        print(f"{run.name:12}{counts}{'  ' + run.problem if run.problem else ''}")
    for run in runs:
        for test, seconds in run.slowest.items():
            if seconds >= 1:
                print(f"{seconds:8.1f} s  {test}")
    for reason, count in sum((Counter(run.skipped) for run in runs), Counter[str]()).items():
        print(f"skipped {count}: {reason}")
    print(f"{'; '.join(facts['gpus']) or 'no GPU'}; driver {facts['driver'] or 'unknown'}; {facts['versions']}")


def main(results: Path, output: Path, command: str) -> int:
    """Writes the report and returns the exit status."""
    runs = [read_run(status) for status in sorted(results.glob("*.status"))]
    facts = describe()
    report = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command,
        **facts,
        "passed": sum(run.passed for run in runs),
        "failed": sum(len(run.failures) for run in runs),
        "skipped": sum(sum(run.skipped.values()) for run in runs),
        "incomplete": sum(bool(run.problem) for run in runs),
        "runs": [asdict(run) for run in runs],
    }
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(runs, facts)
    good = report["passed"] and not report["failed"] and not report["incomplete"]
    print("all good" if good else "NOT good: nothing passed, or something failed, hung or died")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]))
