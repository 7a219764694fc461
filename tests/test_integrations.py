"""docs/integrations.md keeps its word: its examples run, and its shim is what an engine finds as deep_ep."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import expertwire as ew

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")


def example(name: str) -> Any:
    """Import an example by its path."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def on_ranks(part: Callable[[ew.Group], Any], num_ranks: int) -> list[Any]:
    """Run part(group) on ranks that are threads; examples start processes, which takes longer."""
    with ThreadPoolExecutor(num_ranks) as ranks:
        return list(ranks.map(part, ew.local_group(num_ranks)))


def test_every_example_is_named() -> None:
    named = set(re.findall(r"`examples/(\w+)\.py`", PAGE))
    assert named == {"serving_layer", "token_dispatcher", "from_jax"}


def test_serving_layer() -> None:
    pytest.importorskip("torch")
    layer = example("serving_layer")

    def rank(group: ew.Group) -> float:
        buffer = layer.make_buffer(group)
        difference: float = layer.decode_steps(buffer, "cpu")
        buffer.destroy()
        return difference

    assert 0 < max(on_ranks(rank, layer.RANKS)) < 0.04


def test_token_dispatcher() -> None:
    pytest.importorskip("torch")
    dispatcher = example("token_dispatcher")
    assert 0 < max(on_ranks(dispatcher.rank_main, dispatcher.RANKS)) < 0.02


def test_jax() -> None:
    pytest.importorskip("jax")
    jax = example("from_jax")
    assert all(on_ranks(jax.rank_main, jax.RANKS))


def test_shim_is_found_and_imported_as_engines_do(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    (shell,) = re.findall(r"```bash\n(mkdir -p shim.*?)```", PAGE, re.DOTALL)
    find = "import importlib.util as u; assert u.find_spec('deep_ep'); from deep_ep import Buffer, Config, EventOverlap"
    script = f'set -eu\npython() {{ {sys.executable} "$@"; }}\n{shell}\npython -c "{find}"\n'
    environment = {"PYTHONPATH": "", **os.environ}
    done = subprocess.run(
        ["/bin/sh", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (told,) = re.findall(r"# (<class .*>)", shell)
    assert done.stdout.strip() == told
