"""Pins how answers of providers are sorted: asked again, refused, nothing created, or nobody knows.

Without it a lost answer becomes a second machine, or a list that failed becomes "nothing is rented".
"""

from __future__ import annotations

import email.utils
import time
from collections.abc import Callable, Iterator

import httpx
import pytest
from pydantic import BaseModel

from rollouts.infra.clouds import CLOUDS, find_cloud
from rollouts.infra.errors import (
    InfraError,
    MissingKeyError,
    OfferGoneError,
    PermanentInfraError,
    ProviderRefusedError,
    ProviderUnavailableError,
    UnclearAnswerError,
)
from rollouts.infra.offers import GPUQuery, MachineSpec
from rollouts.infra.providers.clouds import CREDENTIALS_VARIABLE, open_account, require_keys
from rollouts.infra.providers.http import MAX_ANSWER_BYTES, Endpoint, ProviderAPI, _Turns
from rollouts.infra.providers.lambda_cloud import Lambda
from rollouts.infra.providers.runpod import RunPod
from rollouts.infra.providers.vast import Vast
from tests.infra.fake_cloud import KEY as FAKE_KEY
from tests.infra.fake_cloud import FakeCloud
from tests.infra.fake_lambda import FakeLambda
from tests.infra.fake_vast import FakeVast

KEY = "sk-canary-0123456789"


class _Thing(BaseModel):
    id: str


def make_api(
    answer: Callable[[httpx.Request], httpx.Response], *, patience_s: float = 0.0
) -> tuple[ProviderAPI, list[httpx.Request]]:
    seen: list[httpx.Request] = []

    def handler(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return answer(request)

    endpoint = Endpoint(title="Cloud", url="http://cloud", key_variable="CLOUD_API_KEY", patience_s=patience_s)
    return ProviderAPI(endpoint, KEY, httpx.MockTransport(handler)), seen


def fails(error: type[Exception]) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        raise error("it broke")

    return answer


def says(status: int, text: str = "", **headers: str) -> Callable[[httpx.Request], httpx.Response]:
    return lambda request: httpx.Response(status, text=text, headers=headers)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (says(400, "no longer any instances"), OfferGoneError),
        (says(404), OfferGoneError),
        (says(410, "no_such_ask"), OfferGoneError),
        (says(422, "disk"), OfferGoneError),
        (says(401), ProviderRefusedError),
        (says(402), ProviderRefusedError),
        (says(403), ProviderRefusedError),
        (says(429), ProviderUnavailableError),
        (fails(httpx.ConnectError), ProviderUnavailableError),
        (says(408), UnclearAnswerError),
        (says(500), UnclearAnswerError),
        (says(502, "<html>"), UnclearAnswerError),
        (says(307, Location="http://elsewhere"), UnclearAnswerError),
        (says(201, "created"), UnclearAnswerError),
        (says(201, '{"id": null}'), UnclearAnswerError),
        (fails(httpx.ReadTimeout), UnclearAnswerError),
        (fails(httpx.RemoteProtocolError), UnclearAnswerError),
        (fails(httpx.WriteError), UnclearAnswerError),
    ],
)
def test_a_creation_is_sent_once_and_its_answer_sorted(
    answer: Callable[[httpx.Request], httpx.Response], error: type[InfraError]
) -> None:
    api, seen = make_api(answer)
    with pytest.raises(error) as caught:
        api.create("/machines", {}, _Thing, is_machine=True)
    assert type(caught.value) is error and len(seen) == 1
    if error is UnclearAnswerError:
        with pytest.raises(ProviderUnavailableError):
            api.create("/keys", {}, _Thing)


@pytest.mark.parametrize(
    "answer", [says(408), says(500), says(200, "no JSON"), says(200, "{}"), fails(httpx.ReadTimeout)]
)
def test_a_reading_that_fails_is_an_error_and_never_nothing(answer: Callable[[httpx.Request], httpx.Response]) -> None:
    api, _ = make_api(answer)
    with pytest.raises(ProviderUnavailableError):
        api.find("/machines/1", _Thing)


def test_a_provider_that_cannot_be_reached_answered_nothing() -> None:
    api, _ = make_api(fails(httpx.ConnectError))
    with pytest.raises(ProviderUnavailableError, match=r"^Cloud does not answer \(ConnectError\) to GET /machines$"):
        api.read("/machines", _Thing)


@pytest.mark.slow
def test_readings_and_creations_wait_as_long_as_they_are_told() -> None:
    answers = iter([httpx.Response(429, text="slow down", headers={"Retry-After": "0.01"}), httpx.Response(429)])
    api, seen = make_api(lambda request: next(answers, httpx.Response(200, json={"id": "m"})), patience_s=60)
    assert api.read("/machines/1", _Thing).id == "m" and len(seen) == 3
    answers = iter([httpx.Response(429, headers={"Retry-After": "0.01"})])
    assert api.create("/machines", {}, _Thing).id == "m"


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now, self.pauses = 1000.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("rollouts.infra.providers.http.time", clock)
    monkeypatch.setattr("rollouts.infra.providers.http._TURNS", _Turns())  # those of the real time are another thing
    return clock


@pytest.mark.parametrize("verb", ["read", "create"])
def test_a_provider_that_names_no_pause_is_asked_less_and_less_often_and_then_given_up(clock: Clock, verb: str) -> None:
    api, seen = make_api(says(429, "Too Many Requests"), patience_s=60)
    with pytest.raises(ProviderUnavailableError, match="429: Too Many Requests"):
        api.read("/machines", _Thing) if verb == "read" else api.create("/machines", {}, _Thing)
    assert all(2**n / 2 <= pause <= 2**n for n, pause in enumerate(clock.pauses[:5]))
    assert 60 / 2 < sum(clock.pauses) <= 60 and len(seen) == len(clock.pauses) + 1 < 10


@pytest.mark.parametrize("verb", ["read", "create"])
@pytest.mark.parametrize("wanted", ["0", "0.001", "Thu, 01 Jan 1970 00:00:01 GMT", "nan"])
def test_a_provider_that_wants_no_pause_is_not_asked_without_one(clock: Clock, verb: str, wanted: str) -> None:
    clock.now = 2000.0
    api, seen = make_api(says(429, **{"Retry-After": wanted}), patience_s=60)
    with pytest.raises(ProviderUnavailableError, match="429"):
        api.read("/machines", _Thing) if verb == "read" else api.create("/machines", {}, _Thing)
    assert 60 / 2 < sum(clock.pauses) <= 60 and len(seen) < 10


def test_a_pause_may_be_named_as_a_date(clock: Clock) -> None:
    date = email.utils.formatdate(clock.now + 7, usegmt=True)
    answers = iter([httpx.Response(429, headers={"Retry-After": date})])
    api, _ = make_api(lambda request: next(answers, httpx.Response(200, json={"id": "m"})), patience_s=60)
    api.read("/machines/1", _Thing)
    assert clock.pauses == [7.0]


def test_requests_are_as_far_apart_as_the_provider_wants_them_whoever_sends_them(clock: Clock) -> None:
    """Each caller opens the account anew: a run, the watch for its end, a look of the reaper."""
    endpoint = Endpoint(
        title="Cloud",
        url="http://paced",
        key_variable="CLOUD_API_KEY",
        min_interval_s=1.5,
        create_interval_s=12.0,
    )

    def opened(key: str) -> ProviderAPI:
        return ProviderAPI(endpoint, key, httpx.MockTransport(says(200, '{"id": "m"}')))

    for _ in range(4):
        opened("mine").read("/machines/1", _Thing)
    assert clock.pauses == [1.5] * 3
    opened("of another account").read("/machines/1", _Thing)
    opened("mine").create("/keys", {}, _Thing)
    assert clock.pauses == [1.5] * 4
    began = clock.now
    for _ in range(3):
        opened("mine").create("/machines", {}, _Thing, is_machine=True)
    assert clock.now - began == pytest.approx(2 * 12.0 + 1.5)


@pytest.mark.parametrize(
    ("fake_type", "account", "between_s"),
    [(FakeLambda, Lambda, 12.0), (FakeVast, Vast, 4.5)],  # five launches a minute; the interval in Vast.ai's refusals
)
def test_machines_are_asked_for_as_slowly_as_the_provider_wants(
    fake_type: type[FakeCloud], account: type[Lambda | Vast], between_s: float, clock: Clock
) -> None:
    fake = fake_type()
    with fake.served() as url:
        began = clock.now
        for number in range(3):
            with account(FAKE_KEY, url) as cloud:
                spec = MachineSpec(name=f"rollouts-{number}", public_key="ssh-ed25519 AAAA me", disk_gb=50)
                cloud.create(cloud.search(GPUQuery())[0], spec)
    assert len(fake.machines) == 3 and 2 * between_s <= clock.now - began < 2 * between_s + 5


def test_a_refusal_of_runpod_is_waited_for_as_long_as_its_shortest_window_lasts(clock: Clock) -> None:
    """Its document: windows of a minute, an hour and a day, each with how long it lasts as Retry-After."""
    answers = iter([httpx.Response(429, headers={"Retry-After": "60"})])

    def answer(request: httpx.Request) -> httpx.Response:
        clock.now += 0.2
        return next(answers, httpx.Response(200, json={"pods": []}))

    with RunPod(KEY, transport=httpx.MockTransport(answer)) as cloud:
        assert cloud.list_named("rollouts-") == [] and clock.pauses == [60.0]


def test_a_wait_beyond_our_patience_is_not_begun() -> None:
    api, seen = make_api(says(429, **{"Retry-After": "3600"}), patience_s=60)
    with pytest.raises(ProviderUnavailableError, match="429"):
        api.read("/machines", _Thing)
    assert len(seen) == 1


def test_an_endless_answer_is_cut() -> None:
    api, _ = make_api(says(200, "x" * (MAX_ANSWER_BYTES + 1)))
    with pytest.raises(ProviderUnavailableError, match="does not answer"):
        api.read("/machines", _Thing)


@pytest.mark.parametrize("is_machine", [False, True])
def test_an_answer_that_drips_is_given_up(is_machine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else who ends machines would wait for it for ever, and end none."""
    monkeypatch.setattr("rollouts.infra.providers.http.MAX_ANSWER_S", 0.05)

    def drip() -> Iterator[bytes]:
        for _ in range(1000):
            time.sleep(0.01)
            yield b" "

    api, _ = make_api(lambda request: httpx.Response(200, content=drip()))
    began = time.monotonic()
    with pytest.raises(UnclearAnswerError if is_machine else ProviderUnavailableError, match="does not answer"):
        if is_machine:
            api.create("/machines", {}, _Thing, is_machine=True)
        else:
            api.read("/machines", _Thing)
    assert time.monotonic() - began < 5


def test_the_key_is_sent_and_shown_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    api, seen = make_api(lambda request: httpx.Response(401, text=f"bad key {request.headers['authorization']}\x1b[2J"))
    with pytest.raises(ProviderRefusedError, match="CLOUD_API_KEY") as caught:
        api.read("/machines", _Thing)
    assert seen[0].headers["authorization"] == f"Bearer {KEY}"
    shown = str(caught.value) + repr(caught.value.args) + caplog.text
    assert KEY not in shown and "\x1b" not in shown


@pytest.mark.parametrize(
    ("status", "meaning"),
    [(401, "the key is not valid"), (402, "there is no money on the account"), (403, "the key may not do that")],
)
def test_a_refusal_is_taken_at_once_and_names_the_key_and_what_was_asked(status: int, meaning: str) -> None:
    api, seen = make_api(says(status, f"not with {KEY}"), patience_s=60)
    with pytest.raises(ProviderRefusedError) as caught:
        api.read("/machines", _Thing)
    expected = f"Cloud refused GET /machines with {status}, {meaning} (not with ***): check the key in CLOUD_API_KEY"
    assert str(caught.value).startswith(expected) and len(seen) == 1


def test_a_wrong_key_is_said_to_be_one_also_where_the_provider_says_it_with_404() -> None:
    with FakeVast().served() as url, Vast("wrong", url, min_interval_s=0) as cloud:
        with pytest.raises(ProviderRefusedError, match=r"with 404.*Invalid user key.*check the key in VAST_API_KEY"):
            cloud.search(GPUQuery())
        with pytest.raises(ProviderRefusedError, match="with 401, the key is not valid"):
            cloud.list_named("rollouts-")


class _Things(BaseModel):
    things: dict[str, _Thing]


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, '{"things": {"\\u001b[2J": {}, "\\u009b2J": 1}}'),
        (400, '"\x1b[2J": "\x1b]0;title\x07"'),
        (500, "\x9b2J\r\n"),
    ],
)
def test_what_a_provider_says_moves_no_cursor(status: int, text: str) -> None:
    api, _ = make_api(says(status, text))
    with pytest.raises(InfraError) as caught:
        api.read("/machines", _Things)
    assert str(caught.value).isprintable()


def test_an_offer_of_a_new_kind_does_not_hide_the_others(caplog: pytest.LogCaptureFixture) -> None:
    fake = FakeVast()
    fake.asks = [{**fake.asks[0], "gpu_name": None}, fake.asks[0]]
    with fake.served() as url, Vast(FAKE_KEY, url, min_interval_s=0) as cloud:
        assert [offer.gpu_type for offer in cloud.search(GPUQuery())] == ["H100 SXM"]
        assert "Vast.ai answered a search with 1 of 2 offers in an unreadable answer (gpu_name: " in caplog.text
        fake.asks = fake.asks[:1]
        with pytest.raises(ProviderUnavailableError, match=r"1 of 1 offers in an unreadable answer \(gpu_name: "):
            cloud.search(GPUQuery())


def test_a_missing_key_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in (find_cloud(name).endpoint for name in CLOUDS):
        monkeypatch.delenv(entry.key_variable, raising=False)
    monkeypatch.delenv("ROLLOUTS_CREDENTIALS", raising=False)
    with pytest.raises(MissingKeyError, match="put it into the variable RUNPOD_API_KEY"):
        open_account("runpod")
    with pytest.raises(MissingKeyError, match="LAMBDA_API_KEY or SHADEFORM_API_KEY"):
        require_keys(("lambda", "shadeform"))


@pytest.mark.parametrize("key", ["rpa_ABC…", "clé", "two words", "two\nlines"])
def test_what_cannot_be_a_key_is_said_to_be_none(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in (find_cloud(name).endpoint for name in CLOUDS):
        monkeypatch.setenv(entry.key_variable, key)
    for name in CLOUDS.keys() - {"sky"}:
        variable = find_cloud(name).endpoint.key_variable
        with pytest.raises(MissingKeyError, match=f"{variable} is not a key") as raised:
            open_account(name)
        assert key not in str(raised.value)
    open_account("sky")  # a path may be anything


@pytest.mark.parametrize(
    "url", ["api.proxy", "proxy:8080", "http://", "http://host:port", "http://[::1", "http://a\x01"]
)
def test_what_cannot_be_an_address_of_an_api_is_said_to_be_none(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CLOUDS.keys() - {"sky"}:
        endpoint = find_cloud(name).endpoint
        monkeypatch.setenv(endpoint.key_variable, FAKE_KEY)
        monkeypatch.setenv(endpoint.url_variable, url)
        with pytest.raises(PermanentInfraError, match=f"{endpoint.url_variable} is not an address of .*{endpoint.url}"):
            open_account(name)


@pytest.mark.parametrize(
    ("in_use", "command"),
    [
        ("", r"Prefect's by `rollouts credentials NAME RUNPOD_API_KEY` and name that as run\.c.* --credentials"),
        ("team", r"or save it in the credentials team, which lack it, by `rollouts credentials team RUNPOD_API_KEY`"),
    ],
)
def test_a_missing_key_names_the_way_through_prefect(
    in_use: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CREDENTIALS_VARIABLE, in_use)
    monkeypatch.delenv("RUNPOD_API_KEY", raising=False)
    for ask in (lambda: open_account("runpod"), lambda: require_keys(("runpod",))):
        with pytest.raises(MissingKeyError, match=command):
            ask()
