"""Pins which models are refused or warned of before any training: by what they are, and by what they have to see.

Without it a run would train on masks, places or lengths that its model does not heed.
"""

import inspect
import json
import re
import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    BartConfig,
    BigBirdConfig,
    BloomConfig,
    CodeGenConfig,
    FalconConfig,
    Gemma3Config,
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTNeoConfig,
    JambaConfig,
    LlamaConfig,
    MixtralConfig,
    MixtralForCausalLM,
    MptConfig,
    MusicgenConfig,
    OPTConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    Qwen3_5Config,
    Qwen3VLConfig,
    ReformerConfig,
    SeedOssConfig,
    T5Config,
)

from rollouts_core.checks.demonstrations import check_demonstrations
from rollouts_core.checks.model_checks import (
    check_jax_model,
    check_language_model,
    check_longest,
    check_model_files,
    check_model_vocabulary,
    check_packing,
    check_shared_heads,
    check_updatable,
    warn_of_dropout,
    warn_of_long_completions,
)
from rollouts_core.checks.validate import (
    validate_config,
)
from rollouts_core.config import Config, DeploymentConfig, LoRAConfig, ModelConfig, PolicyConfig
from rollouts_core.errors import CheckpointError, ConfigError, InputError
from rollouts_core.model.loading import (
    MODELS_OF_ROW_DISTANCES,
    MODELS_OF_SHORT_ROWS,
    UNMASKED_MODELS,
    UNTOLD_MODELS,
    find_unmasked_layers,
)
from rollouts_core.model.policy import create_policy
from tests.rollouts_core.checks.configurations import SUM, make_config, with_rollout, write_rows
from tests.rollouts_core.make import write_tied

COMPARED = ("sft_eval", "selection", "heldout")
"""The demonstrations that are not trained on."""
MODELS: dict[str, PreTrainedConfig] = {
    "gpt2": GPT2Config(n_positions=16),
    "gptj": GPTJConfig(n_positions=16),
    "opt": OPTConfig(max_position_embeddings=16),
    "gpt_neo": GPTNeoConfig(max_position_embeddings=16),
    "mpt": MptConfig(max_seq_len=16),
    "llama": LlamaConfig(max_position_embeddings=16),
    "jamba": JambaConfig(max_position_embeddings=16),
    "bart": BartConfig(),
    "bloom": BloomConfig(),
    "falcon": FalconConfig(alibi=True),
}
"""Tables of learned, and of computed, positions; positions that go on; and none at all."""
SHORT_ROWS: dict[str, PreTrainedConfig] = {
    "big_bird": BigBirdConfig(
        max_position_embeddings=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        attention_type="original_full", is_decoder=True, vocab_size=32, bos_token_id=1, eos_token_id=2, sep_token_id=3,
    ),
    "gpt_neo": GPTNeoConfig(
        max_position_embeddings=16, hidden_size=16, num_layers=1, num_heads=2, attention_types=[[["global"], 1]],
        vocab_size=32,
    ),
    "mpt": MptConfig(max_seq_len=16, d_model=16, n_layers=1, n_heads=2, vocab_size=32),
    "reformer": ReformerConfig(
        max_position_embeddings=16, hidden_size=16, num_attention_heads=2, attn_layers=["local"], is_decoder=True,
        axial_pos_embds=False, vocab_size=32,
    ),
    "codegen": CodeGenConfig(n_positions=16, n_embd=64, n_layer=1, n_head=4, rotary_dim=4, vocab_size=32),
    "gpt2": GPT2Config(n_positions=16, n_embd=16, n_layer=1, n_head=2, vocab_size=32),
    "opt": OPTConfig(
        max_position_embeddings=16, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16,
        word_embed_proj_dim=16, vocab_size=32,
    ),
}  # fmt: skip
"""Models with 16 positions; the last three compute rows that are longer."""


def config_of(model: Path, mode: str, **settings: object) -> Config:
    """A configuration of which the model is looked at, and the data is not."""
    data = dict.fromkeys(("sft", "prompts", "selection", "heldout"), "rows.jsonl")
    return Config.model_validate({"mode": mode, "model": {"path": str(model)}, "data": data, **settings})


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        (
            "org/small",
            "; to download it from the hub: hf download org/small --local-dir org/small",
        ),
        ("Qwen3-0.6B", "; to download it from the hub: hf download ORGANISATION/Qwen3-0.6B --local-dir Qwen3-0.6B"),
        ("/models/Qwen3-0.6B", ""),
    ],
)
def test_a_model_that_an_engine_is_to_serve_and_that_is_no_folder_is_downloaded_first(path: str, advice: str) -> None:
    data = {name: f"{name}.jsonl" for name in ("sft", "selection", "heldout")}
    config = Config.model_validate({"mode": "sft", "model": {"path": path}, "data": data})
    with pytest.raises(ConfigError) as refused:
        check_model_files(config)
    assert (
        str(refused.value)
        == f"model.path: {path} is not a folder: give the folder of a Hugging Face checkpoint{advice}"
    )


def test_a_model_that_is_a_file_is_not_looked_for_at_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    weights = Path("small") / "model.safetensors"
    weights.parent.mkdir()
    weights.touch()
    data = {name: f"{name}.jsonl" for name in ("sft", "selection", "heldout")}
    with pytest.raises(ConfigError) as refused:
        check_model_files(Config.model_validate({"mode": "sft", "model": {"path": str(weights)}, "data": data}))
    assert str(refused.value) == f"model.path: {weights} is a file: give the folder of a Hugging Face checkpoint"


@pytest.mark.slow
@pytest.mark.matrix
def test_models_that_cannot_be_told_positions_are_known() -> None:
    known = UNMASKED_MODELS | UNTOLD_MODELS | MODELS_OF_ROW_DISTANCES
    unknown = [
        settings.model_type
        for settings, model in MODEL_FOR_CAUSAL_LM_MAPPING.items()
        if settings.model_type not in known
        and "position_ids" not in inspect.signature(model.forward).parameters
        and not find_unmasked_layers(settings())
    ]
    assert unknown == []


@pytest.mark.parametrize(
    ("mode", "packing", "named"),
    [
        ("sft", {}, r"training\.sft\.packing = false"),
        ("sft+rl", {}, r"training\.sft\.packing and training\.rl\.packing = false"),
        ("sft+rl", {"sft": {"packing": False}}, r"training\.rl\.packing = false"),
        ("sft", {"sft": {"packing": False}}, ""),
    ],
)
@pytest.mark.parametrize("family", ["jamba", "bart", "bloom", "falcon"])
def test_a_model_that_heeds_no_mask_is_refused_where_rows_are_packed(
    tmp_path: Path, family: str, mode: str, packing: dict[str, Any], named: str
) -> None:
    MODELS[family].save_pretrained(tmp_path)
    config = config_of(tmp_path, mode, training=packing)
    place = {
        "jamba": "the linear_attention layers of jamba",
        "bart": "bart models",
        "bloom": "bloom models",
        "falcon": "falcon with ALiBi models",
    }[family]
    words = f"would affect each other in {place}: set {named}"
    with pytest.raises(ConfigError, match=words) if named else nullcontext():
        check_packing(config)


@pytest.mark.parametrize(
    ("mode", "rl", "is_refused"),
    [
        ("sft", {}, False),
        ("rl", {}, True),
        ("sft+rl", {}, True),
        ("sft+rl", {"packing": False}, False),
        ("rl", {"policy": {"attention": "flash_attention_2", "precision": "bfloat16"}}, False),
    ],
)
def test_a_model_that_counts_distances_along_the_row_is_refused_where_completions_share_a_prompt(
    tmp_path: Path, mode: str, rl: dict[str, Any], is_refused: bool
) -> None:
    GPTNeoConfig().save_pretrained(tmp_path)
    config = config_of(tmp_path, mode, training={"rl": rl})
    words = r"gpt_neo models would compute wrong distances to a shared prompt: set training\.rl\.packing = false"
    with pytest.raises(ConfigError, match=words) if is_refused else nullcontext():
        check_packing(config)


@pytest.mark.parametrize(("num_tokens", "is_warned"), [(17, False), (18, True)])
def test_a_length_that_changes_how_shorter_samples_are_rotated_is_warned_of(
    tmp_path: Path, num_tokens: int, is_warned: bool
) -> None:
    """A tiny Phi-3 gave a short sample log-probs that were 0.5 nats apart, with a long one in its batch and without."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rotation = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    Phi3Config(
        hidden_size=16, num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
        original_max_position_embeddings=16, rope_parameters=rotation,
    ).save_pretrained(tmp_path)  # fmt: skip
    rollout = {"max_prompt_tokens": num_tokens - 8, "sampling": {"max_new_tokens": 8}}
    config = config_of(tmp_path, "rl", rollout=rollout)
    findings = [check_longest("rows.jsonl", num_tokens, config.model), warn_of_long_completions(config)]
    remedies = ("set training.sft.max_length to 17 or less", "lower rollout.max_prompt_tokens or rollout.sampling.max_")
    for found, remedy in zip(findings, remedies, strict=True):
        assert [remedy in sentence for sentence in found] == [True] * is_warned


@pytest.mark.parametrize(
    ("settings", "refused", "warned"),
    [
        (LlamaConfig(), "", ""),
        (Gemma3Config(), "", ""),  # trained with what sees images
        (Qwen3_5Config(), "", "only the language model inside the qwen3_5 model at .* is trained"),
        (Qwen3VLConfig(), "a qwen3_vl model, which transformers cannot load as a language model", ""),
        (T5Config(), "a t5 model, which transformers cannot load as a language model", ""),
        (MusicgenConfig(), "a musicgen model, which transformers cannot load as a language model", ""),
    ],
)
def test_what_is_no_language_model_is_refused_and_what_is_more_than_one_warned_of(
    tmp_path: Path, settings: PreTrainedConfig, refused: str, warned: str
) -> None:
    settings.save_pretrained(tmp_path)
    config = config_of(tmp_path, "sft")
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        assert [bool(re.search(warned, sentence)) for sentence in check_language_model(config)] == [True] * bool(warned)


@pytest.mark.parametrize(
    ("settings", "mode", "named"),
    [
        (SeedOssConfig(), "rl", "(attention_dropout 0.1, residual_dropout 0.1 in its config.json)"),
        (GPT2Config(embd_pdrop=0.0), "sft+rl", "(resid_pdrop 0.1, attn_pdrop 0.1 in its config.json)"),
        (GPT2Config(), "sft", ""),
        (GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), "rl", ""),  # classifiers of it still would
        (GPTNeoConfig(), "rl", ""),
        (LlamaConfig(), "rl", ""),
    ],
)
def test_dropout_is_warned_of_where_the_loss_compares_with_an_engine(
    tmp_path: Path, settings: PreTrainedConfig, mode: str, named: str
) -> None:
    """Of a small GPT-2 with 0.1, 28 to 37 % of all tokens were clipped before the first update."""
    settings.save_pretrained(tmp_path)
    config = config_of(tmp_path, mode)
    assert [named in sentence for sentence in warn_of_dropout(config)] == [True] * bool(named)


@pytest.mark.parametrize("deployment", [{"trainer_gpu_ranks": (0, 1)}, {"trainer_processes": 2}])
def test_jax_with_several_processes_is_refused_before_the_stage_that_trains_with_it(
    base_model: ModelConfig, deployment: dict[str, Any]
) -> None:
    config = config_of(Path(base_model.path), "sft+rl")
    rl = config.training.rl.model_copy(update={"policy": PolicyConfig(backend="jax")})
    config = config.model_copy(update={"training": config.training.model_copy(update={"rl": rl})})
    check_jax_model(config)
    several = config.model_copy(update={"deployment": DeploymentConfig(**deployment)})
    [setting] = deployment
    with pytest.raises(ConfigError, match=rf'deployment\.{setting}: training\.rl\.policy\.backend "jax" trains in one'):
        check_jax_model(several)
    check_jax_model(several.model_copy(update={"mode": "sft"}))


@pytest.mark.parametrize(("mode", "rank", "is_told"), [("rl", 8, True), ("sft", 8, False), ("rl", 0, False)])
def test_dropout_of_adapters_is_warned_of_like_that_of_the_model(
    tmp_path: Path, mode: str, rank: int, is_told: bool
) -> None:
    LlamaConfig().save_pretrained(tmp_path)
    config = config_of(tmp_path, mode)
    policy = PolicyConfig(lora=LoRAConfig(rank=rank, dropout=0.05))
    stages = {kind: getattr(config.training, kind).model_copy(update={"policy": policy}) for kind in ("sft", "rl")}
    found = warn_of_dropout(config.model_copy(update={"training": config.training.model_copy(update=stages)}))
    said = "training.rl.policy.lora.dropout 0.05 drops inputs of adapters"
    assert [sentence.startswith(said) for sentence in found] == [True] * is_told


@pytest.mark.parametrize(
    ("mode", "kind", "refused"),
    [("rl", "vllm", True), ("sft+rl", "vllm", True), ("sft", "vllm", False), ("rl", "sglang", False)],
)
def test_a_model_whose_new_weights_vllm_would_not_serve_is_refused(
    tmp_path: Path, mode: str, kind: str, refused: bool
) -> None:
    """Without it the run would end at the first update, after SFT and the start of the engine."""
    GPT2Config(n_layer=1, n_head=1, n_embd=2).save_pretrained(tmp_path)
    save_file({"transformer.wte.weight": torch.zeros(4, 2)}, tmp_path / "model.safetensors")
    config = config_of(tmp_path, mode, rollout={"engine": {"kind": kind}})
    expected = pytest.raises(CheckpointError, match="no separate head can be made") if refused else nullcontext()
    with expected:
        check_updatable(config)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_head_that_config_json_ties_to_an_embedding_of_other_values_is_refused(
    tmp_path: Path, base_model: ModelConfig, is_sharded: bool
) -> None:
    """Before a run: SFT would train it for hours, and selection then find that no engine computes with it."""
    folder = write_tied(base_model, tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    if is_sharded:
        (folder / "model.safetensors").unlink()
        names = {"a.safetensors": ["lm_head.weight"], "b.safetensors": sorted(set(weights) - {"lm_head.weight"})}
        for file, held in names.items():
            save_file({name: weights[name] for name in held}, folder / file, metadata={"format": "pt"})
        index = {"weight_map": {name: file for file, held in names.items() for name in held}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = make_config("s").model_copy(update={"model": ModelConfig(path=str(folder))})
    with pytest.raises(CheckpointError, match=r"^model\.path: the weights at .*m have an output head that differs"):
        check_model_files(config)
    holder = folder / ("a.safetensors" if is_sharded else "model.safetensors")
    mended = {**load_file(holder), "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
    save_file(mended, holder, metadata={"format": "pt"})
    check_model_files(config)


def test_weights_of_other_shapes_than_their_config_json_are_refused(tmp_path: Path, base_model: ModelConfig) -> None:
    """Before a run: the machine for it would be rented, and given back when the training loads them."""
    folder = tmp_path / "m"
    shutil.copytree(base_model.path, folder)
    config = make_config("s").model_copy(update={"model": ModelConfig(path=str(folder))})
    check_model_files(config)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "intermediate_size": 96}))
    expected = r"^model\.path: the weights at .*m do not match its config\.json: .*proj\.weight has shape .*, expected "
    with pytest.raises(CheckpointError, match=expected):
        check_model_files(config)


def test_experts_that_transformers_puts_together_are_of_their_config_json(
    tmp_path: Path, base_model: ModelConfig
) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_local_experts": 4}
    model = MixtralForCausalLM(MixtralConfig(**sizes, vocab_size=29, num_attention_heads=4, num_key_value_heads=2))
    folder = tmp_path / "m"
    shutil.copytree(base_model.path, folder)
    model.save_pretrained(folder)
    check_model_files(make_config("s").model_copy(update={"model": ModelConfig(path=str(folder))}))


@pytest.mark.parametrize(
    ("num_gpus", "changes", "refused"),
    [
        (2, {}, ""),
        (14, {}, ""),
        (4, {}, r"share the 14 heads .* \(2 key-value heads\) evenly: use 2 GPUs per engine,"),
        (7, {}, "7 GPUs of an engine cannot"),
        (4, {"mode": "sft"}, "4 GPUs of an engine cannot"),
        (4, {"mode": "sft", "evaluation": {"engine": "embedded"}}, ""),
        (4, {"num_engines": 2}, ""),
        (4, {"extra_args": ["--pipeline-parallel-size=2"]}, ""),
    ],
)
def test_gpus_that_cannot_share_a_models_heads_are_refused(
    tmp_path: Path, num_gpus: int, changes: dict[str, Any], refused: str
) -> None:
    """SGLang ends by an assertion without words, vLLM by an error, after SFT and minutes of loading."""
    LlamaConfig(num_attention_heads=14, num_key_value_heads=2, hidden_size=28).save_pretrained(tmp_path)
    settings = {
        "rollout": {"engine": {"kind": "sglang", "extra_args": changes.get("extra_args", [])}},
        "deployment": {"engine_gpu_ranks": range(num_gpus), "num_engines": changes.get("num_engines", 1)},
        "evaluation": changes.get("evaluation", {}),
    }
    config = config_of(tmp_path, changes.get("mode", "rl"), **settings)
    with pytest.raises(ConfigError, match=refused) if refused else nullcontext():
        check_shared_heads(config)


@pytest.mark.parametrize(
    ("quantization", "method"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
    ],
)
@pytest.mark.parametrize("is_loaded", [False, True])
def test_a_quantized_model_is_refused_before_a_training_and_by_it(
    quickstart_dir: Path, tmp_path: Path, quantization: dict[str, Any], method: str, is_loaded: bool
) -> None:
    """Where bitsandbytes is installed nothing but norms and embeddings would be trained, without a word."""
    folder = tmp_path / "quantized"
    shutil.copytree(quickstart_dir / "base_model", folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"quantization_config": quantization}))
    config = with_rollout(environment="arithmetic").model_copy(update={"model": ModelConfig(path=str(folder))})
    with pytest.raises(InputError, match=rf"{folder} are quantized \({method}, .*use the original model"):
        create_policy(config.model, PolicyConfig()) if is_loaded else validate_config(config)


@pytest.mark.parametrize(("padding", "is_refused"), [(10**6, True), (0, False), (-1, False), (None, False)])
def test_a_token_of_padding_that_the_model_does_not_embed_is_refused(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, padding: int | None, is_refused: bool
) -> None:
    """torch ends the job by an assertion about padding_idx there."""
    settings = {"model_type": "llama", "vocab_size": len(tokenizer), "pad_token_id": padding}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    refused = pytest.raises(CheckpointError, match=r"pad_token_id in .* set it to the pad token of the")
    with refused if is_refused else nullcontext():
        check_model_vocabulary(ModelConfig(path=str(tmp_path)), tokenizer)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("max_length", [17, 18, 60])
def test_demonstrations_that_are_longer_than_what_the_model_sees_are_refused_or_told(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, family: str, max_length: int
) -> None:
    MODELS[family].save_pretrained(tmp_path)
    path = write_rows(tmp_path / "a.jsonl", [SUM, {"text": "1" * 40}, SUM])
    config = make_config(path, max_length=max_length)
    config = config.model_copy(update={"model": ModelConfig(path=str(tmp_path))})
    num_needed = min(max_length, 41) - 1
    found = f"a demonstration of {num_needed + 1} tokens needs {num_needed} positions, but the model at {tmp_path}"
    if max_length > 17 and family in ("gpt2", "gptj", "opt", "gpt_neo", "mpt"):
        with pytest.raises(ConfigError, match=f"{found} has 16: set training.sft.max_length to 17 or less"):
            check_demonstrations(config, tokenizer)
        return
    told = [sentence for sentence in check_demonstrations(config, tokenizer) if "positions" in sentence]
    assert [sentence.partition(":")[2].strip() for sentence in told] == [
        f"{found} was made for 16: tokens beyond that teach it little; set training.sft.max_length to 17 or less"
    ] * (max_length > 17 and family in ("llama", "jamba"))


@pytest.mark.parametrize("family", SHORT_ROWS)
def test_packed_rows_of_more_tokens_than_a_model_computes_in_one_are_refused(tmp_path: Path, family: str) -> None:
    """Without it the training would end at the first row that is longer than the model's table of a row."""
    settings = SHORT_ROWS[family]
    settings.save_pretrained(tmp_path)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(settings)](settings)
    too_long = torch.full((1, 17), 5)
    is_refused = family in MODELS_OF_SHORT_ROWS
    with pytest.raises((RuntimeError, ValueError)) if is_refused else nullcontext():
        model(input_ids=too_long, position_ids=torch.arange(17)[None] % 8, use_cache=False)
    for max_length, packing in ((17, True), (18, False), (18, True)):
        config = config_of(tmp_path, "sft", training={"sft": {"max_length": max_length, "packing": packing}})
        refused = pytest.raises(ConfigError, match=r"max_length: packed rows of 18 tokens need 17 .* set it to 17 or ")
        with refused if is_refused and (max_length, packing) == (18, True) else nullcontext():
            check_packing(config)


@pytest.mark.parametrize("longest", ["sft_eval", "selection", "heldout"])
def test_rows_whose_loss_is_compared_fit_the_model_too(tmp_path: Path, base_model: ModelConfig, longest: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(base_model.path, folder)
    settings = GPT2Config(n_positions=16, n_embd=8, n_head=2, n_layer=1, vocab_size=29, tie_word_embeddings=False)
    GPT2LMHeadModel(settings).save_pretrained(folder)
    rows = {name: [{**SUM, "prompt": f"{place}+1=?"}] for place, name in enumerate(("sft", *COMPARED))}
    rows[longest].append({"text": "1" * 20})
    data = {name: write_rows(tmp_path / f"{name}.jsonl", each) for name, each in rows.items()}
    config = Config.model_validate(
        {"mode": "sft", "model": {"path": str(folder)}, "data": data, "evaluation": {"metric": "loss"}}
    )
    with pytest.raises(ConfigError, match=rf"{longest}\.jsonl: a demonstration of 21 tokens needs 20 positions"):
        validate_config(config)
