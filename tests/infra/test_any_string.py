"""Properties of every string of a configuration that reaches a command, a path, a variable or a URL.

Without these tests a name with a quote, a newline, `$(...)` or a leading dash that nobody thought of could be a command
on a rented machine, or a file in another place.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from rollouts.flows.form import RunOptions
from rollouts.infra.errors import PermanentInfraError
from rollouts.infra.jobs import JobSpec, JobState, cancel_job, start_or_attach
from rollouts.infra.node import NodeSettings, SSHNode
from rollouts.infra.session import LocalSession, Session
from rollouts.infra.sync.push import publish_directory
from rollouts.tasks.records import RunScope
from tests.infra.shell_jobs import wait_for_end
from tests.infra.sync.pulling import pull_run

pytestmark = pytest.mark.slow

# The same strings every time, and none kept in a folder of the checkout.
settings.register_profile(
    "here",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("here")

LIKELY = [
    "'",
    '"',
    "\\",
    "$(touch x)",
    "`id`",
    "${HOME}",
    ";",
    "&&",
    "|",
    ">",
    "\n",
    "\r",
    "\t",
    " ",
    "-",
    "--",
    "..",
    "~",
]
LIKELY += [
    "*",
    "?",
    "[",
    "{a,b}",
    "!",
    "#",
    "%2e",
    "%",
    "@",
    ":",
    "=",
    ",",
    "ü",
    "漢",
    "\U0001f600",
    "\udcff",
    "\x7f",
    "a",
]
HOSTILE = st.lists(st.sampled_from(LIKELY) | st.characters(exclude_characters="\0", codec="utf-8"), max_size=12).map(
    "".join
)
"""What no program can be given is left out: zero bytes."""
FILE_NAME = HOSTILE.map(lambda text: text.replace("/", "|")).filter(lambda name: name not in ("", ".", ".."))
PLAIN = "plain1"
"""What nothing refuses: each test of what is refused or as it should be is given it, and must not see it refused."""
SHOW_ARGUMENTS = "import os, sys; sys.stdout.buffer.write(b'\\0'.join(map(os.fsencode, sys.argv[1:])))"


@pytest.fixture(params=["local", pytest.param("ssh", marks=pytest.mark.slow)])
def session(request: pytest.FixtureRequest) -> Session:
    if request.param == "local":
        return LocalSession(sys.executable)
    session: Session = request.getfixturevalue("ssh_session")
    return session


def accepted(record: Any, given: dict[str, Any], field: str, *, is_plain: bool) -> Any:  # Any: of every record
    """The settings as a record; None where they are refused, which one field alone may be the reason for.

    Args:
        is_plain: the field holds what must not be refused.
    """
    try:
        return TypeAdapter(record).validate_python(given)
    except ValidationError as error:
        assert all(field in each["loc"] for each in error.errors()) and not is_plain, error
        return None


@contextmanager
def folder_of_its_own() -> Iterator[Path]:
    """One for each string, which `tmp_path` is not."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


@given(arguments=st.lists(HOSTILE, max_size=6))
@settings(max_examples=30)
def test_arguments_arrive_as_they_are(session: Session, arguments: list[str]) -> None:
    completed = session.run([sys.executable, "-c", SHOW_ARGUMENTS, "first", *arguments], timeout_s=60)
    assert completed.stdout.split(b"\0") == [b"first", *map(os.fsencode, arguments)]


@given(folder=FILE_NAME, name=FILE_NAME, content=st.binary(max_size=100))
@settings(max_examples=30)
def test_a_file_is_written_where_it_is_said(session: Session, folder: str, name: str, content: bytes) -> None:
    with folder_of_its_own() as parent:
        session.write_file(str(parent / folder / name), content)
        assert [path for path in parent.rglob("*") if path.is_file()] == [parent / folder / name]
        assert session.read_file(str(parent / folder / name)) == content


@given(names=st.lists(FILE_NAME, min_size=1, max_size=4, unique=True), destination=FILE_NAME)
@example(names=[PLAIN], destination=PLAIN)
@settings(max_examples=20)
def test_a_directory_arrives_whole_or_not_at_all(session: Session, names: list[str], destination: str) -> None:
    with folder_of_its_own() as source, folder_of_its_own() as there:
        for name in names:
            (source / name).write_bytes(name.encode(errors="surrogateescape"))
        try:
            publish_directory(session, source, str(there / destination))
        except PermanentInfraError:  # a name that is refused
            assert list(there.iterdir()) == [] and names != [PLAIN]
        else:
            assert contents_of(there / destination) == contents_of(source)


@given(names=st.lists(FILE_NAME, min_size=1, max_size=4, unique=True), run=FILE_NAME)
@example(names=[PLAIN], run=PLAIN)
@settings(max_examples=20)
def test_what_a_job_leaves_is_fetched_as_it_is_or_left_out(session: Session, names: list[str], run: str) -> None:
    with folder_of_its_own() as there, folder_of_its_own() as here:
        (there / run / "samples").mkdir(parents=True)
        for name in names:
            (there / run / "samples" / name).write_bytes(name.encode(errors="surrogateescape"))
        pull_run(session, str(there / run), here / "mirror")
        left = contents_of(there / run / "samples")
        wanted = {name: content for name, content in left.items() if is_fetched(name)}
        found = contents_of(here / "mirror/samples") if (here / "mirror/samples").exists() else {}
        # As a comparison alone: what pytest would show of a name may be no text that can be sent.
        assert bool(found == wanted) and (names != [PLAIN] or bool(found))
        assert [path.name for path in here.iterdir()] == ["mirror"]


def is_fetched(name: str) -> bool:
    """Whether a name is one that every machine can have, and nothing of ours."""
    return name.isprintable() and "\\" not in name and not name.startswith((".", "damaged"))


@given(root=FILE_NAME, argument=HOSTILE, value=HOSTILE)
@settings(max_examples=5)
def test_a_job_gets_its_directory_arguments_and_variables_as_they_are(
    session: Session, root: str, argument: str, value: str
) -> None:
    show = "import os, sys; sys.stdout.buffer.write(os.fsencode(sys.argv[1]) + b'\\0' + os.environb[b'VALUE'])"
    with folder_of_its_own() as parent:
        run_dir = parent / root / f"sft-{secrets.token_hex(4)}"
        argv = (sys.executable, "-c", show, argument)
        try:
            start_or_attach(session, JobSpec(run_dir=str(run_dir), argv=argv, job={}, env={"VALUE": value}))
            assert wait_for_end(session, run_dir).state is JobState.EXITED
            assert (run_dir / "log.txt").read_bytes() == os.fsencode(argument) + b"\0" + os.fsencode(value)
        finally:
            cancel_job(session, str(run_dir), grace_s=0.2)


@given(name=HOSTILE)
@example(name=PLAIN)
@settings(max_examples=150)
def test_a_name_of_a_run_is_refused_or_stays_in_its_place(name: str) -> None:
    given = {"name": name, "publish": "s3://bucket/models"}
    options = accepted(RunOptions, given, "name", is_plain=name == PLAIN)
    if options is None:
        return
    scope = RunScope(run_id="0" * 32, run_name=options.name, store="/store", publish=options.publish)
    assert scope.output_dir.parent == Path("/store/runs") and os.path.normpath(scope.output_dir) == str(
        scope.output_dir
    )
    assert scope.publication_url.removeprefix("s3://bucket/models/") == name
    assert not set(name) & set("/?#%\\ \n")


@given(text=HOSTILE, field=st.sampled_from(["host", "root", "python"]))
@example(text=PLAIN, field="host")
@example(text=PLAIN, field="root")
@example(text=PLAIN, field="python")
@settings(max_examples=150)
def test_a_setting_of_a_node_is_refused_or_one_word_of_a_command(text: str, field: str) -> None:
    valid = {"kind": "ssh", "host": "me@node", "python": "/usr/bin/python3"}
    plain = f"me@{PLAIN}" if field == "host" else f"/{PLAIN}"
    for value in (text, f"/{text}", f"me@{text}", f"~/{text}"):
        node = accepted(NodeSettings, {**valid, field: value}, field, is_plain=value == plain)
        if node is None:
            continue
        assert isinstance(node, SSHNode)
        assert "\n" not in value and "\0" not in value and not value.startswith("-")
        if field == "host":
            assert not set(value) & set(" '\"\\$`;&|<>*?()")


def contents_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}
