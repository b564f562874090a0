"""Pins who needs to export a key for engines on other machines: nobody, and nobody else can read the one that is made.

Without it each run needs a secret that people have to think of, or a key lies where others see it.
"""

from __future__ import annotations

import stat
from pathlib import Path

from rollouts.tasks.records import RunScope
from rollouts.tasks.unit_keys import KEY_FILE, own_keys, own_unit_key
from rollouts_core.keys import OWN_KEY_VARIABLE, read_key, read_named_keys


def test_the_key_of_a_store_is_made_once_and_readable_by_its_owner_alone(tmp_path: Path) -> None:
    key = own_unit_key(tmp_path)
    assert len(key) >= 32 and own_unit_key(tmp_path) == key
    assert stat.S_IMODE((tmp_path / KEY_FILE).stat().st_mode) == 0o600
    other = tmp_path / "other"
    other.mkdir()
    assert own_unit_key(other) != key


def test_only_jobs_that_want_it_are_given_it(tmp_path: Path) -> None:
    scope = RunScope(run_id="a", run_name="small", store=str(tmp_path))
    assert own_keys({"rollout": {"engine": {"api_key_variable": ""}}}, scope) == {}
    assert not (tmp_path / KEY_FILE).exists()
    for job in (
        {"rollout": {"engine": {"api_key_variable": OWN_KEY_VARIABLE}}},
        {"engine": {"api_key_variable": OWN_KEY_VARIABLE}},
    ):
        known = own_keys(job, scope)
        assert known == read_named_keys(job, known) == {OWN_KEY_VARIABLE: own_unit_key(tmp_path)}
        assert read_key(OWN_KEY_VARIABLE, "rollout.engine", known) == own_unit_key(tmp_path)
