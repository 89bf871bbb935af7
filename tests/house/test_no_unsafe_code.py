"""No pickle, torch.load, eval or exec anywhere in the package (FAILURES D16), and no forbidden imports.

The walk looks at syntax trees, so it also sees imports inside functions, which import-linter's layers
contracts see too, and calls, which they do not.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "kvloom"
FILES = sorted(PACKAGE.rglob("*.py"))

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "code", "runpy"}
UNSAFE_NAMES = {"eval", "exec", "compile", "__import__"}
UNSAFE_ATTRIBUTES = {
    ("torch", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
    ("os", "system"),
    ("builtins", "eval"),
    ("builtins", "exec"),
}
UNSAFE_KEYWORDS = {"allow_pickle", "trust_remote_code", "shell"}

DECIDES = (
    "manager",
    "core",
    "page_tables",
    "kinds",
    "spec",
    "verify",
    "recovery",
    "eviction",
    "plan",
    "types",
    "errors",
    "config",
)
NOT_WHERE_DECIDED = {
    "torch",
    "transformers",
    "threading",
    "asyncio",
    "concurrent",
    "multiprocessing",
    "time",
    "random",
    "os",
    "pathlib",
    "io",
    "tempfile",
    "shutil",
    "socket",
    "subprocess",
    "mmap",
}


def _imports(tree: ast.AST) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _unsafe(tree: ast.AST) -> list[str]:
    found = [name for name in _imports(tree) if name.split(".")[0] in UNSAFE_MODULES]
    found += [name for name in _imports(tree) if tuple(name.rsplit(".", 1)) in UNSAFE_ATTRIBUTES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in UNSAFE_ATTRIBUTES:
                found.append(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_NAMES:
                found.append(f"{node.func.id}()")
            for keyword in node.keywords:
                value = keyword.value
                if keyword.arg in UNSAFE_KEYWORDS and not (isinstance(value, ast.Constant) and value.value is False):
                    found.append(f"{keyword.arg}=")
            if isinstance(node.func, ast.Attribute) and node.func.attr == "load":
                for keyword in node.keywords:
                    if keyword.arg == "weights_only":
                        found.append("torch.load in disguise")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_unsafe(path: Path) -> None:
    assert _unsafe(ast.parse(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import pickle as p",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "exec('1')",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "import yaml\nyaml.load('x')",
        "f(trust_remote_code=flag)",
        "import subprocess\nsubprocess.run('x', shell=True)",
    ],
)
def test_the_walk_finds_what_it_looks_for(source: str) -> None:
    assert _unsafe(ast.parse(source))


DECIDING_FILES = [p for p in FILES if p.relative_to(PACKAGE).parts[0].removesuffix(".py") in DECIDES]


@pytest.mark.parametrize("path", DECIDING_FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_what_decides_touches_nothing(path: Path) -> None:
    roots = {name.split(".")[0] for name in _imports(ast.parse(path.read_text(encoding="utf-8")))}
    assert roots.isdisjoint(NOT_WHERE_DECIDED)
