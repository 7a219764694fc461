"""One ``expertwire run``: text in; report, trace and numbers out."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from expertwire.errors import InvalidArgumentError
from expertwire.machine import describe_machine, describe_versions
from expertwire.run.job import JobResult, run_job
from expertwire.run.plan import JobConfig
from expertwire.run.report import BarProgress, LineProgress, as_json, show
from expertwire.run.text import TokenizedText, read_text
from expertwire.trace import RoutingTrace, TraceInfo, save_trace

_WIDTH_WITHOUT_TERMINAL = 120


@dataclass(frozen=True)
class Request:
    """One command.

    Attributes:
        files: texts; none: the standard library.
        max_tokens: most tokens to take.
        config: of the job.
        check: hold the result against the reference.
        trace_file: where to write the routing.
        json_file: where to write all numbers.
    """

    files: list[Path]
    max_tokens: int
    config: JobConfig
    check: bool
    trace_file: Path | None
    json_file: Path | None

    def validate(self) -> None:
        """Raises InvalidArgumentError for what can be told to be wrong before the work."""
        self.config.check()
        if self.max_tokens < 1:
            raise InvalidArgumentError(f"--tokens = {self.max_tokens}: must be at least 1")
        for option, path in (("--save-trace", self.trace_file), ("--json", self.json_file)):
            if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
                raise InvalidArgumentError(f"{option} = {path}: must be a file in a folder that exists")


def execute(request: Request) -> bool:
    """Runs a job and reports it. Returns False if the result differs from the reference.

    Raises Error, OSError, and whatever made a rank fail.
    """
    request.validate()
    config = request.config
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)
    text = read_text(request.files, request.max_tokens, config.model.vocabulary_size)
    console.print(_headline(config, text), markup=False, soft_wrap=True)
    progress = BarProgress(console) if console.is_terminal else LineProgress(console)
    result = run_job(config, text.ids, progress, request.check)
    try:
        _save(request, text, result)
    finally:  # a full disk does not cost the report, nor a closed terminal the files
        show(console, config, result)
    return result.difference is None


def _save(request: Request, text: TokenizedText, result: JobResult) -> None:
    if request.trace_file is not None:
        save_trace(request.trace_file, _trace(request.config, text, result))
    if request.json_file is not None:
        numbers = {
            "command": ["expertwire", *sys.argv[1:]],
            "machine": describe_machine(),
            "versions": describe_versions(),
            **as_json(request.config, text, result),
        }
        request.json_file.write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


def _headline(config: JobConfig, text: TokenizedText) -> str:
    model = config.model
    words = (config.layout, config.combine_mode, config.dispatch_dtype)
    files = "1 file" if text.num_files == 1 else f"{text.num_files} files"
    layers = "1 layer" if model.num_layers == 1 else f"{model.num_layers} layers"
    return (
        f"{len(text.ids):,} tokens from {files} ({text.source})\n"
        f"{layers} of {model.num_experts} experts, {model.num_topk} for each token, hidden size "
        f"{model.hidden_size}; {config.num_ranks} ranks with at most {config.max_tokens_per_rank} tokens in a step; "
        + ", ".join(str(word.value).replace("_", "-") for word in words)
    )


def _trace(config: JobConfig, text: TokenizedText, result: JobResult) -> RoutingTrace:
    model = config.model
    info = TraceInfo(
        model.num_experts, model.hidden_size, config.num_ranks, config.max_tokens_per_rank, model.seed, text.source
    )
    offsets = np.array(config.schedule(result.num_tokens).rank_offsets, np.int64)
    return RoutingTrace(result.topk_ids, result.weights, offsets, info)
