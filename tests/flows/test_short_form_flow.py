"""The short form in Prefect's UI: filled in, submitted, with mistakes, and by Quick run. In a real, headless browser.

Without this test the form could hide the values of its configuration, post what the flow refuses, or train again what
the full form has trained.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.flows.test_browser import keep_picture, open_page, page  # noqa: F401
from tests.kit.commands import Rollouts
from tests.kit.serving import address_of, api, trigger, up, wait_for_state
from tests.kit.small_pipeline import write_small_pipeline

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def submit(page: Page) -> dict[str, Any]:  # noqa: F811  # Any: JSON
    """Submit the form, and return the run that Prefect's server made of it."""
    with page.expect_response(lambda response: "create_flow_run" in response.url) as answer:
        page.get_by_role("button", name="Submit").click()
    assert answer.value.status == 201, answer.value.text()
    run: dict[str, Any] = answer.value.json()
    return run


def message_of(rollouts: Rollouts, run_id: str) -> str:
    """The message of a failed run's state."""
    wait_for_state(rollouts, run_id, "FAILED")
    return str(api(rollouts, "GET", f"/flow_runs/{run_id}")["state"]["message"])


@pytest.mark.matrix
def test_the_short_form_is_filled_in_submitted_and_mended(
    served: Rollouts,
    page: Page,  # noqa: F811
    tmp_path: Path,
) -> None:
    up(served, str(write_small_pipeline(tmp_path / "small", mode="sft")))
    deployment = api(served, "GET", "/deployments/name/sft-rl/small-form")
    form = f"/deployments/deployment/{deployment['id']}"
    open_page(page, served, "/deployments")
    page.get_by_text("quickstart-form").first.wait_for()
    keep_picture(page, "deployments")
    page.goto(f"{address_of(served).ui_url}{form}?tab=Description", wait_until="domcontentloaded")
    page.get_by_text("Start a run with the usual settings.").wait_for()
    keep_picture(page, "short form: description")

    with page.expect_response(lambda response: "create_flow_run" in response.url) as answer:
        page.get_by_role("button", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Quick run").click()
    quick = answer.value.json()["id"]
    wait_for_state(served, quick, "COMPLETED")
    assert set(api(served, "GET", f"/flow_runs/{quick}")["tags"]) == {"train", "short-form"}

    page.goto(f"{address_of(served).ui_url}{form}/run", wait_until="domcontentloaded")
    steps = page.get_by_label(re.compile("^SFT steps"))
    steps.wait_for()
    assert steps.input_value() == "40"
    more = page.get_by_label(re.compile("^More settings"))
    assert "[training.sft]\nmax_length = 128\n" in more.input_value()
    keep_picture(page, "short form")
    steps.fill("20")
    by_form = submit(page)
    assert by_form["parameters"]["sft_steps"] == 20
    wait_for_state(served, by_form["id"], "COMPLETED")
    wait_for_state(served, trigger(served, "small", "training.sft.num_steps=20"), "COMPLETED")
    assert len(list(served.store.glob("stages/sft-*"))) == 2, "the full form reuses what the short form trained"
    code, output = served.run("status")
    assert code == 0 and f"small-{quick[:8]}" in output, output

    page.goto(f"{address_of(served).ui_url}{form}/run", wait_until="domcontentloaded")
    more.wait_for()
    more.fill("[training")
    mistaken = submit(page)["id"]
    assert "the form: More settings is not valid TOML: " in message_of(served, mistaken)
    page.goto(f"{address_of(served).ui_url}/runs/flow-run/{mistaken}", wait_until="domcontentloaded")
    page.get_by_text("More settings is not valid TOML").first.wait_for()
    keep_picture(page, "short form: a mistake")

    given = deployment["parameters"]["more_settings"]
    twice = given.replace("[training.sft]", "[training.sft]\nnum_steps = 7").replace(
        "min_free_gb = 0.1", "min_free = 1"
    )
    for parameters, expected in (
        (
            {"sft_steps": 30, "more_settings": twice},
            "training.sft.num_steps is 30 in the field SFT steps and 7 in More",
        ),
        ({"more_settings": twice}, "the form: unknown key node.min_free; did you mean min_free_gb?"),
        ({"data": "sft = '/missing'"}, 'mode "sft" needs data.selection'),
    ):
        question = {"parameters": parameters}
        asked = api(served, "POST", f"/deployments/{deployment['id']}/create_flow_run", question)
        assert expected in message_of(served, asked["id"])
    code, output = served.run("run", "--deployment", "small-form")
    assert (code, "rollouts run --deployment small accepts every setting" in output) == (2, True), output
