"""Pins that our programs for nodes need nothing but Python there, and that one of several modules is sent as one text.

Without it a node without our packages can run no job, or says of a failure there only where it was, not what.
"""

import ast
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts import infra
from rollouts.infra import supervisor
from rollouts.infra.node_programs import read_program

INFRA = Path(infra.__file__).parent
SUPERVISOR = Path(supervisor.__file__).parent
FILES = [
    *sorted(SUPERVISOR.glob("*.py")),
    *(INFRA / f"{name}.py" for name in ("bundle", "environment_builder", "locks", "node_agent", "node_probe")),
    *(INFRA / f"sync/{name}.py" for name in ("receiver", "sender")),
]
VERBS = """
import traceback

from rollouts.infra.greeter.words import word
from rollouts.infra.mark import MARK

def main(argv):
    print(word(argv[1]) + MARK)
    try:
        word(None)
    except TypeError:
        traceback.print_exc()
    return 3
"""
WORDS = """
def word(name):
    return "hello " + name  # where it fails
"""


def test_a_package_is_sent_as_one_text_whose_tracebacks_show_its_lines(tmp_path: Path) -> None:
    package = tmp_path / "infra" / "greeter"
    package.mkdir(parents=True)
    for name, text in {"__init__": "", "verbs": VERBS, "words": WORDS, "../mark": "MARK = '!'"}.items():
        (package / f"{name}.py").write_text(text)
    for sent in ([tmp_path / "sent.py"], ["-c", read_program(package)]):
        (tmp_path / "sent.py").write_text(read_program(package))
        seen = subprocess.run([sys.executable, "-I", *sent, "you"], capture_output=True, text=True, check=False)
        assert (seen.returncode, seen.stdout) == (3, "hello you!\n")
        assert "# where it fails" in seen.stderr


def test_an_interpreter_that_is_too_old_says_so_in_a_sentence() -> None:
    as_if_older = "import sys; sys.version_info = (3, 9, 16); exec(sys.argv.pop(1))"
    command = [sys.executable, "-I", "-c", as_if_older, read_program(SUPERVISOR), "status", "/nowhere"]
    answer = json.loads(subprocess.run(command, capture_output=True, check=False).stdout)
    assert answer["error"].startswith(f"Python 3.10 or newer is needed, {sys.executable} is ")


def test_a_program_of_one_file_is_sent_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print('ü')\n", encoding="utf-8")
    assert read_program(tmp_path / "program.py") == "print('ü')\n"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(INFRA)))
def test_what_runs_on_nodes_imports_only_the_standard_library_of_an_older_python(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 10))
    in_types = [each for node in ast.walk(tree) if isinstance(node, ast.If) for each in ast.walk(node)]
    imports = [
        each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom) and each not in in_types
    ]
    modules = {alias.name for each in imports if isinstance(each, ast.Import) for alias in each.names}
    modules |= {str(each.module) for each in imports if isinstance(each, ast.ImportFrom)}
    sent_too = {".".join(("rollouts", "infra", *each.relative_to(INFRA).with_suffix("").parts)) for each in FILES}
    others = modules - sent_too if path.parent == SUPERVISOR else modules
    assert {name.split(".")[0] for name in others} <= sys.stdlib_module_names
    names = {alias.name for each in imports for alias in each.names}
    assert not names & {"Self", "UTC", "StrEnum", "tomllib", "assert_never", "LiteralString"}


def test_each_program_of_one_file_digests_as_the_others_do() -> None:
    """They cannot import the table of digests from one another."""
    texts = [(INFRA / name).read_text() for name in ("node_agent.py", "sync/receiver.py", "sync/sender.py")]
    [table] = {text[text.index("DIGESTS: ") : text.index(".blake3\n")] for text in texts}
    assert "ImportError" in table, "a bare Python is enough"


@pytest.mark.parametrize("is_sent", [True, False], ids=["as one text", "as a folder"])
def test_the_supervisor_runs_where_nothing_of_ours_is_installed(is_sent: bool, tmp_path: Path) -> None:
    program = tmp_path / "supervisor"
    if is_sent:
        program.write_text(read_program(SUPERVISOR))
    else:
        shutil.copytree(SUPERVISOR, program)
        shutil.copy(INFRA / "locks.py", tmp_path)
    seen = subprocess.run(
        [sys.executable, "-I", "-S", "-v", program, "status", tmp_path], capture_output=True, text=True, check=True
    )
    assert json.loads(seen.stdout)["state"] == "ABSENT"
    assert str(INFRA) not in seen.stderr, "a module of this checkout was imported"


def test_the_supervisor_fits_into_an_argument_of_a_command() -> None:
    """So it reaches a node's interpreter that cannot load it, and says there what it lacks (node_agent.py)."""
    assert len(read_program(SUPERVISOR).encode()) < 128 << 10
