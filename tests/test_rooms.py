"""The house rules, read from the sources: who may include or import whom, and limits that keep files readable."""

from __future__ import annotations

import ast
import itertools
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CPP = ROOT / "cpp"
PACKAGE = ROOT / "src" / "expertwire"
KERNELS = PACKAGE / "kernels"

# First match gives the room of a C++ file.
CPP_ROOMS = [
    ("cpp/include/expertwire/", "public"),
    ("cpp/base/", "base"),
    ("cpp/core/", "core"),
    ("cpp/backend/backend.hpp", "contract"),
    ("cpp/backend/registry.cc", "registry"),
    ("cpp/backend/cpu/", "cpu"),
    ("cpp/backend/cuda/", "cuda"),
    ("cpp/bindings/", "bindings"),
    ("cpp/bench/", "bench"),
    ("cpp/examples/", "examples"),
    ("cpp/tests/", "tests"),
    ("src/expertwire/kernels/shared/", "shared"),
    ("src/expertwire/kernels/device/", "device"),
    ("src/expertwire/kernels/", "kernels"),
]

# What a room may include besides itself. `shared` and `public` stand alone.
CPP_DIRECTIONS = {
    "shared": set[str](),
    "public": set[str](),
    "base": {"public"},
    "contract": {"public", "shared"},
    "core": {"public", "base", "contract", "shared"},
    "cpu": {"public", "base", "contract", "shared"},
    "cuda": {"public", "base", "contract", "shared"},
    "registry": {"public", "base", "contract", "cpu", "cuda"},
    "bindings": {"public", "base", "core"},
    "bench": {"public", "base", "cuda"},
    "examples": {"public"},
    "tests": {"public", "base", "contract", "shared", "core", "cpu", "cuda", "bench"},
    "device": {"shared"},
    "kernels": {"shared", "device"},
}

# System headers that only one place may name: pattern -> path prefixes.
CPP_SYSTEM_HEADERS = {
    r"cuda|nvrtc|nvml|nccl": ("cpp/examples/",),
    r"torch/|ATen/|c10/": (),
    r"Python\.h|nanobind/": ("cpp/bindings/",),
    r"doctest/": ("cpp/tests/",),
    r"mpi\.h": ("cpp/include/expertwire/mpi_bootstrap.hpp",),
    r"sys/mman\.h|linux/futex\.h": ("cpp/backend/cpu/", "cpp/backend/cuda/", "cpp/tests/"),
    r"dlfcn\.h": ("cpp/backend/cuda/driver.cc", "cpp/tests/test_driver_calls.cc"),
    r"immintrin\.h|arm_neon\.h": ("cpp/backend/cpu/",),
}

# Words of code that only one place may use: pattern -> path prefixes.
CPP_WORDS = {
    r"\b(secure_)?getenv\s*\(|\benviron\b": ("cpp/base/env.cc",),
    r"\b(setenv|unsetenv|putenv)\s*\(": ("cpp/tests/",),
    r"\bdlopen\s*\(": ("cpp/backend/cuda/driver.cc", "cpp/tests/test_driver_calls.cc"),
    r"\bofstream\b|\bfopen\s*\(": ("cpp/backend/cuda/jit.cc", "cpp/bench/", "cpp/tests/", "cpp/examples/"),
    r"\b(abort|_?exit|quick_exit|_Exit|terminate)\s*\(": ("cpp/tests/", "cpp/bench/", "cpp/examples/"),
    r"\b(system|popen)\s*\(": (),
    r"\bdoctest::(skip|may_fail|should_fail|expected_failures)\b": (),  # a test that fails is mended
    r"\b([A-Z]+_)*(CHECK|WARN)(_\w+)?\s*\(": (),  # goes on where it fails, and a forked process would end well: REQUIRE
    r"^\s*#\s*define\b": ("src/expertwire/kernels/shared/platform.cuh",),
    r"\b(cudaMalloc|cudaStream|CUstream|at::|torch::|PyObject|nb::)": (
        "cpp/bindings/",
        "cpp/backend/cuda/",
        "cpp/bench/",
        "cpp/examples/",
        "cpp/tests/stand_in/",
    ),
}

# Rooms of the Python package by first component of the module path; what is not listed belongs to the API.
PYTHON_ROOMS = {
    "types": "facts",
    "errors": "facts",
    "reference": "reference",
    "_core": "bindings",
    "interop": "interop",
    "machine": "facts",
    "trace": "facts",
    "bench": "bench",
    "run": "run",
    "info": "programs",
    "precompile": "programs",
    "cli": "programs",
    "__main__": "programs",
}
PYTHON_DIRECTIONS = {
    "facts": set[str](),
    "reference": {"facts"},
    "bindings": {"facts"},
    "interop": {"facts", "bindings", "api"},
    "api": {"facts", "bindings", "interop"},
    "bench": {"facts", "reference", "api"},
    "run": {"facts", "reference", "api"},
    "programs": {"facts", "bindings", "api", "bench", "run"},
}
# Imports at module level that only these may have; everywhere else they stand in the function that needs them.
PYTHON_OPTIONAL = {
    "torch": ("src/expertwire/interop/",),
    "cupy": ("src/expertwire/interop/",),
    "mpi4py": (),
    "matplotlib": (),
    "typer": ("src/expertwire/cli.py", "src/expertwire/bench/", "src/expertwire/run/command.py"),
}
# The one reader, and the main job, which sets the number of BLAS threads for processes it starts.
PYTHON_ENVIRONMENT = ("src/expertwire/env.py", "src/expertwire/run/job.py")

MAX_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 150
MAX_PARAMETERS = 6
UNFINISHED = re.compile(rf"\b({'|'.join(('TO' + 'DO', 'FIX' + 'ME', 'XX' + 'X'))})\b")


@dataclass(frozen=True)
class Source:
    """A file of the project: its path from the root, and its text."""

    name: str
    text: str

    @property
    def path(self) -> Path:
        return ROOT / self.name


def read(*folders: Path, suffixes: set[str]) -> list[Source]:
    paths = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in suffixes)
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


CPP_SOURCES = read(CPP, KERNELS, suffixes={".cc", ".hpp", ".cuh"})
PACKAGE_SOURCES = read(PACKAGE, suffixes={".py"})
PYTHON_SOURCES = PACKAGE_SOURCES + read(ROOT / "tests", ROOT / "benchmarks", ROOT / "examples", suffixes={".py"})


def cpp_room(name: str) -> str:
    for prefix, room in CPP_ROOMS:
        if name.startswith(prefix):
            return room
    raise AssertionError(f"{name} lies in no room: give it one in CPP_ROOMS, and say what it may include")


def includes(source: Source, mark: str) -> list[str]:
    """Names between <> (mark "<") or quotes (mark '"')."""
    return re.findall(rf"^\s*#\s*include\s*{mark}([^>\"]+)", source.text, re.MULTILINE)


def included(source: Source) -> list[str]:
    """Paths from the root of the project's own files that a file includes."""
    result = []
    for name in includes(source, '"'):
        places = (folder / name for folder in (source.path.parent, CPP / "include", CPP, KERNELS, CPP / "tests"))
        path = next((place.resolve() for place in places if place.is_file()), None)
        assert path, f'{source.name} includes "{name}", which is nowhere in the project'
        result.append(path.relative_to(ROOT).as_posix())
    return result


def wrong_includes(source: Source) -> Iterator[str]:
    room = cpp_room(source.name)
    for target in included(source):
        if cpp_room(target) not in CPP_DIRECTIONS[room] | {room}:
            yield f"{source.name} ({room}) includes {target} ({cpp_room(target)})"
    if room == "shared":
        for name in includes(source, "<"):
            yield f"{source.name} includes {name}"
    if {"cpu", "cuda"} <= {cpp_room(target) for target in included(source)} and room != "registry":
        yield f"{source.name} names both backends"


def without_comments(text: str) -> str:
    """C++ text with comments and string literals emptied; lines stay where they are."""
    pattern = r'//[^\n]*|/\*.*?\*/|R"\((?:.*?)\)"|"(?:\\.|[^"\\\n])*"'
    return re.sub(pattern, lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)


def misplaced_headers_and_words(source: Source) -> Iterator[str]:
    for name, (pattern, places) in itertools.product(includes(source, "<"), CPP_SYSTEM_HEADERS.items()):
        if re.match(pattern, name) and not source.name.startswith(places):
            yield f"{source.name}: <{name}>"
    for number, line in enumerate(without_comments(source.text).splitlines(), 1):
        for pattern, places in CPP_WORDS.items():
            if re.search(pattern, line) and not source.name.startswith(places):
                yield f"{source.name}:{number}: {line.strip()}"


def python_room(name: str) -> str:
    """Room of a module or file below the package: "types", "interop.arrays", "bench/command.py"."""
    return PYTHON_ROOMS.get(re.split(r"[./]", name, maxsplit=1)[0], "api")


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return name == "_core" or path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def import_statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def imported(source: Source, node: ast.Import | ast.ImportFrom) -> list[str]:
    """Absolute names that an import statement may load: `from a import b` gives a and a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    base = node.module or ""
    if node.level:
        package = source.path.relative_to(PACKAGE.parent).parent.parts
        base = ".".join((*package[: len(package) - node.level + 1], *filter(None, [base])))
    return [base, *(f"{base}.{alias.name}" for alias in node.names)]


def wrong_imports(source: Source) -> Iterator[str]:
    room = python_room(source.name.removeprefix("src/expertwire/"))
    for node in import_statements(ast.parse(source.text)):
        for name in imported(source, node):
            below = name.removeprefix("expertwire.")
            if below != name and is_module(below) and python_room(below) not in PYTHON_DIRECTIONS[room] | {room}:
                yield f"{source.name}:{node.lineno} ({room}) imports {name} ({python_room(below)})"


def early_optional_imports(source: Source) -> Iterator[str]:
    tree = ast.parse(source.text)
    for_types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)]
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    late = {inner for node in (*for_types, *functions) for inner in ast.walk(node)}
    for node in set(import_statements(tree)) - late:
        for top in {name.split(".")[0] for name in imported(source, node)} & PYTHON_OPTIONAL.keys():
            if not source.name.startswith(PYTHON_OPTIONAL[top]):
                yield f"{source.name}:{node.lineno} imports {top}"


def environment_uses(source: Source) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.text)):
        named = isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv", "putenv"}
        if named and source.name not in PYTHON_ENVIRONMENT:
            yield f"{source.name}:{node.lineno} uses {ast.unparse(node)}"


def oversized_file(source: Source) -> Iterator[str]:
    lines = source.text.splitlines()
    if len(lines) > MAX_LINES:
        yield f"{source.name}: {len(lines)} lines"
    if Path(source.name).stem in {"common", "helper", "helpers", "misc", "util", "utils"}:
        yield f"{source.name}: a name that says nothing"
    yield from (f"{source.name}:{i}: unfinished" for i, line in enumerate(lines, 1) if UNFINISHED.search(line))


def oversized_python_functions(source: Source) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            # Options of a command line are declared as Annotated parameters, a line or two each, and passed by name.
            length = (node.end_lineno or node.lineno) - node.body[0].lineno + 1
            arguments = [one for one in node.args.args if "Annotated" not in ast.dump(one) and one.arg != "self"]
            if length > MAX_FUNCTION_LINES or len(arguments) > MAX_PARAMETERS:
                yield f"{source.name}:{node.lineno} {node.name}: {length} lines, {len(arguments)} parameters"


def oversized_cpp_functions(source: Source) -> Iterator[str]:
    limit = MAX_KERNEL_LINES if cpp_room(source.name) in {"kernels", "device"} else MAX_FUNCTION_LINES
    lines = source.text.splitlines()
    for last in (number for number, line in enumerate(lines) if line == "}"):  # so the formatter closes a function
        first = next((number for number in range(last, -1, -1) if re.match(r"[A-Za-z_]", lines[number])), last)
        if last - first + 1 > limit:
            yield f"{source.name}:{first + 1}: {last - first + 1} lines"


RULES = {
    rule.__name__: (rule, sources)
    for rule, sources in (
        (wrong_includes, CPP_SOURCES),
        (misplaced_headers_and_words, CPP_SOURCES),
        (oversized_cpp_functions, CPP_SOURCES),
        (wrong_imports, PACKAGE_SOURCES),
        (early_optional_imports, PACKAGE_SOURCES),
        (environment_uses, PACKAGE_SOURCES),
        (oversized_python_functions, PYTHON_SOURCES),
        (oversized_file, CPP_SOURCES + PYTHON_SOURCES),
    )
}


@pytest.mark.parametrize("name", RULES)
def test_sources_keep_the_rule(name: str) -> None:
    rule, sources = RULES[name]
    broken = [line for source in sources for line in rule(source)]
    assert not broken, "\n".join(broken)


@pytest.mark.parametrize(
    ("name", "file", "text"),
    [
        ("wrong_includes", "cpp/core/a.cc", '#include "backend/cpu/rows.hpp"'),
        ("wrong_includes", "cpp/backend/cpu/a.hpp", '#include "core/plan.hpp"'),
        ("wrong_includes", "cpp/include/expertwire/a.hpp", '#include "base/env.hpp"'),
        ("wrong_includes", "src/expertwire/kernels/shared/a.cuh", "#include <cstdint>"),
        ("misplaced_headers_and_words", "cpp/core/a.cc", "#include <sys/mman.h>"),
        ("misplaced_headers_and_words", "cpp/core/a.cc", "#include <cuda_runtime.h>"),
        ("misplaced_headers_and_words", "cpp/core/a.cc", "#include <Python.h>"),
        ("misplaced_headers_and_words", "cpp/bench/a.cc", "#include <doctest/doctest.h>"),
        ("misplaced_headers_and_words", "cpp/core/a.cc", 'auto home = std::getenv("HOME");'),
        ("misplaced_headers_and_words", "cpp/backend/cpu/a.cc", "std::abort();"),
        ("misplaced_headers_and_words", "cpp/backend/cpu/a.cc", "#define ROWS 4"),
        ("misplaced_headers_and_words", "cpp/tests/test_a.cc", "CHECK_EQ(a, b);"),
        ("misplaced_headers_and_words", "cpp/tests/test_a.cc", 'FAIL_CHECK("a");'),
        ("misplaced_headers_and_words", "cpp/tests/test_a.cc", "WARN(a == b);"),
        ("misplaced_headers_and_words", "cpp/tests/test_a.cc", 'TEST_CASE("a" * doctest::may_fail()) {'),
        ("oversized_cpp_functions", "cpp/core/a.cc", "int f() {\n" + "  g();\n" * 60 + "}"),
        ("wrong_imports", "src/expertwire/types.py", "from .communicator import MoECommunicator"),
        ("wrong_imports", "src/expertwire/interop/a.py", "from ..bench import schema"),
        ("wrong_imports", "src/expertwire/reference.py", "import expertwire.communicator"),
        ("wrong_imports", "src/expertwire/run/a.py", "from expertwire.bench import schema"),
        ("early_optional_imports", "src/expertwire/a.py", "try:\n  import torch\nexcept ImportError: pass"),
        ("environment_uses", "src/expertwire/a.py", "import os\nos.environ['A']"),
        ("oversized_python_functions", "src/expertwire/a.py", "def f(a, b, c, d, e, f, g): pass"),
        ("oversized_python_functions", "src/expertwire/a.py", "def f():\n" + "  g()\n" * 61),
        ("oversized_file", "src/expertwire/a.py", "\n" * 401),
        ("oversized_file", "src/expertwire/utils.py", ""),
    ],
)
def test_rule_sees_what_it_forbids(name: str, file: str, text: str) -> None:
    assert list(RULES[name][0](Source(file, text)))


def test_comments_and_strings_are_not_code() -> None:
    text = '// getenv("A")\nconst char* a = "abort()";\n/* exit(1)\n*/ int b;'
    assert without_comments(text) == "\nconst char* a = ;\n\n int b;"
    assert not list(misplaced_headers_and_words(Source("cpp/core/a.cc", text)))


def test_importing_the_package_loads_nothing_optional() -> None:
    unwanted = ("torch", "matplotlib", "mpi4py", "cupy", "typer", "rich")
    code = f"import sys, expertwire; print(*[name for name in {unwanted} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == []


def test_one_version_of_each_tool() -> None:
    pinned = dict(re.findall(r'"([a-z-]+)==([0-9.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    hooks = re.findall(r"([a-z-]+)==([0-9.]+)", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert set(pinned) == {name for name, _ in hooks}
    assert all(pinned[name] == version for name, version in hooks)
