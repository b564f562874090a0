"""Pins that settings refuse addresses with a password or key, and that the refusal does not repeat the secret.

Settings lie in job.json, in the database of Prefect, in reports and logs.
"""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from rollouts.flows.form import RunOptions
from rollouts.flows.retrain_settings import RetrainConfig
from rollouts.infra.node import NodeSettings
from rollouts_core.config import Config, EngineConfig, RewardConfig
from rollouts_core.config.secret_addresses import refuse_secrets
from rollouts_core.errors import ConfigError

QUERIES = (
    *("token", "api_key", "apikey", "API-KEY", "access_token", "key", "X-Amz-Signature", "X-Amz-Credential", "sig"),
    *("X-Amz-Security-Token", "x-goog-signature", "password", "passwd", "pwd", "secret", "client_secret", "auth"),
    *("subscription-key", "AWSAccessKeyId", "Authorization", "jwt", "session_id", "code", "%74oken", "a=1&token"),
    *("a=1;token", "a=1#token"),
)


@pytest.mark.parametrize("query", QUERIES)
def test_a_key_in_the_query_of_a_service_is_refused_and_not_repeated(query: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        RewardConfig(kind="http", url=f"https://judge.example/v1?{query}=PASSWORD")
    sentence = refusal.value.errors()[0]["msg"]
    assert "the query of the address contains a key or password" in sentence and "PASSWORD" not in sentence


KEYS = (
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYz01234567",
    "sk-ant-api03-AbCd1EfGh2IjKl3MnOp4QrSt5",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U",
    "xoxb-123456789012-1234567890123-AbCdEfGhIjKl0123MnOpQrSt",
    "kPvaZ9qXwxLm/VbTcYrJsHnDf/GuQoEiWpZxCvBn",  # as secrets of AWS
    "tR7kq2Lw-9XzBv4Nc_Hj6Fd3Sg-Pm8Ty5UaQe1Wi0",  # as secrets.token_urlsafe makes them
    "0123456789abcdef0123456789abcdef",
    "0123456789abcdef0123456789abcdef01234567",
    "sv=2022-11-02&sig=AbCd%2FEfGh%3D",
)
"""Made up, in the forms of well-known services."""


@pytest.mark.parametrize(
    "url",
    [
        "https://host/v1?x=sk-proj-0123456789abcdefghijkl",
        "https://host/v1?sk-proj-0123456789abcdefghijkl",
        "https://host/v1#access=0123456789abcdefghijklmnop",
        "https://user:PASSWORD@host/v1",
        "https://PASSWORD@host",
        "https://user:PASSWORD@host?x=1",
        "judge.example/v1?token=PASSWORD",
        "user:PASSWORD@judge.example:8000/v1",
        "git+ssh://git:PASSWORD@github.com/org/repository",
        *(f"https://host/v1?x={key}" for key in KEYS),
    ],
)
def test_what_looks_like_a_key_is_refused_whatever_its_name(url: str) -> None:
    with pytest.raises(ValidationError, match="settings are stored with runs and shown in reports"):
        RewardConfig(kind="http", url=url)


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.slack.com/services/T00000000/B00000000/XXXXXXXX",
        "https://discord.com/api/webhooks/123456789012345678/abc",
        "https://api.telegram.org/bot123456:ABC-DEF1234ghIkl/sendMessage",
        "https://acme.webhook.office.com/webhookb2/PASSWORD/IncomingWebhook/b/c",
        "https://dl.example/Tq8ZpLr4WnXs2VbKc7Yd9Mf1/python/simple/",
        "https://host/v1/sk-proj-0123456789ab/chat",
        "https://host/hf_AbCdEfGhIjKlMnOp/x",
        "https://host/a/%68f_AbCdEfGhIjKlMnOp",
        "https://host/s/AKfycbx7Qm2Rz9TnVw4Lk8Hd1Jp5Fs/exec?mode=math",
        "https://host/s/AKfycbx7Qm2Rz9TnVw4Lk8Hd1Jp5Fs#top",
    ],
)
def test_a_key_in_the_path_of_a_service_is_refused_and_not_repeated(url: str) -> None:
    for settings in ({"url": url}, {"url": "https://host", "judge_prompt": f"see {url} {{response}}"}):
        with pytest.raises(ValidationError) as refusal:
            RewardConfig(kind="judge", model="m", **settings)
        sentence = refusal.value.errors()[0]["msg"]
        assert "the path of the address contains a key or password" in sentence
        assert url.split("/")[4] not in sentence


@pytest.mark.parametrize("part", ["Tq8ZpLr4WnXs2VbK", "pypi-AbCdEfGhIjKlMnOp1", "%54q8ZpLr4WnXs2VbKc7"])
def test_a_package_index_with_a_key_in_its_path_is_refused(part: str) -> None:
    ssh = {"kind": "ssh", "host": "gpu", "python": "/usr/bin/python3"}
    adapter = TypeAdapter[NodeSettings](NodeSettings)
    for url in (f"https://dl.example/{part}", f"https://dl.example/basic/{part}/org/python/simple/"):
        with pytest.raises(ValidationError) as refusal:
            adapter.validate_python({**ssh, "package_index": url})
        assert "query and key" in (sentence := refusal.value.errors()[0]["msg"]) and part not in sentence
    adapter.validate_python({**ssh, "package_index": "https://artifacts.example/api/pypi/Python-3/simple/"})


@pytest.mark.parametrize(
    "url",
    [
        "https://gateway.example/v1/0123456789abcdef0123456789abcdef/my-gateway/openai",  # an account's number
        "https://host/models/DeepSeek-R1-Distill-Qwen-32B-Instruct-AWQ/v1",
        "https://host/meta-llama/Llama-3.1-8B-Instruct/resolve/0123456789abcdef0123456789abcdef01234567/config.json",
        "https://host/v1/projects/my-project/locations/us-central1/endpoints/1234567890123456789",
        "https://host/endpoints/123e4567-e89b-12d3-a456-426614174000/v1",
        "s3://bucket/Tq8ZpLr4WnXs2VbKc7Yd9Mf1/rows.jsonl",
        "http://127.0.0.1:30000/generate",
    ],
)
def test_other_paths_are_kept(url: str) -> None:
    refuse_secrets(url)


@pytest.mark.parametrize(
    "query",
    [
        *("api-version=2024-06-01-preview", "mode=math", "max_tokens=512", "model=org/name-7b"),
        *("author=me", "authors=we", "tokenizer=llama", "max_token=512", "sort_key=name"),
        *("deployment=my-deployment-gpt-4o-mini", "model=meta-llama/Llama-3.1-8B-Instruct"),
        "revision=0123456789abcdef0123456789abcdef01234567",
        "run=123e4567-e89b-12d3-a456-426614174000",
    ],
)
def test_other_queries_are_kept(query: str) -> None:
    assert RewardConfig(kind="http", url=f"https://host/v1?{query}").url.endswith(query)


@pytest.mark.parametrize(
    "text", ["Is a@b.example valid? 1:2@3 is not.", "Which key?", "a? token=x", "see https://x.example/a"]
)
def test_prompts_of_a_judge_may_speak_of_addresses(text: str) -> None:
    prompt = f"{text} {{prompt}} {{response}}"
    reward = RewardConfig(kind="judge", url="https://host/v1", model="m", judge_prompt=prompt)
    assert reward.judge_prompt == prompt


def test_the_name_of_a_login_of_ssh_is_no_secret() -> None:
    refuse_secrets("package @ git+ssh://git@github.com/org/repository@v1")


SETTINGS: dict[str, Any] = {
    "model": {"model": {"path": "URL"}},
    "data": {"data": {"prompts": "URL"}},
    "several data": {"data": {"sft": [{"path": "URL"}]}},
    "resumed": {"training": {"rl": {"resume_from": "URL"}}},
    "judge": {"rollout": {"rewards": [{"kind": "judge", "url": "URL", "model": "m"}]}},
    "classifier": {"rollout": {"rewards": [{"kind": "classifier", "model": "URL"}]}},
    "router": {"rollout": {"engine": {"kind": "sglang", "python": "/p", "router_url": "URL"}}},
    "argument": {"rollout": {"engine": {"kind": "sglang", "python": "/p", "extra_args": ["--load", "URL"]}}},
}


def with_url(settings: Any, url: str) -> Any:  # Any: JSON
    if isinstance(settings, dict):
        return {name: with_url(each, url) for name, each in settings.items()}
    if isinstance(settings, list):
        return [with_url(each, url) for each in settings]
    return url if settings == "URL" else settings


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("url", ["https://host?token=PASSWORD", "https://me:PASSWORD@host", "s3://b/x?sig=PASSWORD"])
def test_no_setting_takes_an_address_with_a_secret(setting: str, url: str) -> None:
    base = {"model": {"path": "m"}, "mode": "rl"}
    with pytest.raises(ValidationError) as refusal:
        Config.model_validate({**base, **with_url(SETTINGS[setting], url)})
    said = [each["msg"] for each in refusal.value.errors() if "stored with runs" in each["msg"]]
    assert said and "PASSWORD" not in "".join(said)


def test_settings_of_runs_retrainings_and_machines_take_none_either() -> None:
    for model, settings in (
        (RunOptions, {"name": "x", "publish": "s3://bucket/x?token=PASSWORD"}),
        (RetrainConfig, {"sources": ["https://host/rows?token=PASSWORD"]}),
        (EngineConfig, {"router_url": "http://host?token=PASSWORD"}),
    ):
        with pytest.raises((ValidationError, ConfigError)) as refusal:
            model.model_validate(settings)
        assert "stored with runs" in str(refusal.value)
    ssh = {"kind": "ssh", "host": "gpu", "package_index": "https://host/simple?token=PASSWORD"}
    with pytest.raises(ValidationError) as refused:
        TypeAdapter[NodeSettings](NodeSettings).validate_python(ssh)
    assert "PASSWORD" not in refused.value.errors()[0]["msg"]
