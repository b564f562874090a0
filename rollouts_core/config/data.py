"""`data`: the files of demonstrations and prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, JsonValue, WithJsonSchema, model_validator

from rollouts_core.config.record import PLACEMENT, Finite, FunctionName, Record

ColumnType = Literal["text", "int", "float", "bool", "json"]
"""Types that a CSV column can have."""
RowFile = Literal["sft_eval", "prompts", "selection", "heldout"]
"""Settings of `data` whose value is one file of rows."""


class DatasetConfig(Record):
    """One of several datasets of demonstrations that are mixed for training."""

    path: str = Field(min_length=1, json_schema_extra=PLACEMENT)
    """A JSONL, JSON, CSV or Parquet file, a folder of such files, the folder of a Hugging Face dataset, or a hub id."""
    split: str = Field(default="train", min_length=1)
    """Name of the split, if the folder or hub dataset has several splits."""
    subset: str = ""
    """Name of the configuration, if the hub dataset has several configurations."""
    revision: str = Field(default="", json_schema_extra=PLACEMENT)
    """Commit or tag of a hub dataset. Empty: the newest commit at the time when the run is planned."""
    max_samples: int | None = Field(default=None, ge=1)
    """Use at most this number of rows, from the beginning."""
    repeat: Annotated[Finite, Field(gt=0)] = 1.0
    """How often each row is used per epoch. With a value below 1, an epoch uses this share of the rows, and the next
    epoch uses other rows."""
    columns: dict[str, ColumnType] = Field(default_factory=dict)
    """Types of CSV columns by column name: text, int, float, bool or json. Columns that are not listed are text."""


class PrepareConfig(Record):
    """How the data files are made from a public dataset. The files are made once, before the run."""

    name: FunctionName = ""
    """The preparation function: a name of `rollouts_core.data.preparations.PREPARATIONS`, or `package.module:function`.
    Empty: no preparation."""
    source: str = ""
    """Public dataset: a hub id, or the folder of a downloaded dataset. Empty: the dataset that the preparation
    names."""
    revision: str = ""
    """Commit or tag of a hub dataset. Empty: the commit that the preparation names; for another `source`, the newest
    commit."""
    settings: Annotated[dict[str, JsonValue], WithJsonSchema({"type": "object"})] = Field(default_factory=dict)
    """Keyword arguments of the preparation function, as in `{ num_selection = 100 }`."""


class DataConfig(Record):
    """Files of demonstrations and prompts.

    Relative paths start at the folder of the configuration file. In a pipeline, paths can also be URLs of an object
    store, such as s3://bucket/data/sft.jsonl.
    """

    sft: str | tuple[DatasetConfig, ...] = ""
    """Demonstrations: rows with `messages`, with `prompt` and `completion`, or with `text`. The value is a JSONL, JSON,
    CSV or Parquet file, a dataset folder or a hub id; or a list of datasets, each with its share."""
    streaming: bool = Field(default=False, json_schema_extra=PLACEMENT)
    """Read and tokenize demonstrations during training instead of before it. For data larger than memory."""
    sft_eval: str = ""
    """Demonstrations that are not trained on, and whose loss is measured during SFT. Empty: no measurement."""
    prompts: str = ""
    """Prompts for RL: rows with `prompt` or `messages`, and with `answer` if the reward needs it. The value is a JSONL,
    JSON, CSV or Parquet file, or a dataset folder."""
    rollouts: str = ""
    """Recorded completions for RL, instead of prompts and engines: the folder `samples` of an earlier RL stage.
    Training uses the recorded steps in order. Each recorded step is one batch, so `rollout.batch_size` is ignored."""
    selection: str = ""
    """Prompts, or with `evaluation.metric = "loss"` demonstrations, that choose between checkpoints."""
    heldout: str = ""
    """Prompts, or with `evaluation.metric = "loss"` demonstrations, for the scores in the report. `selection` must not
    contain any of these rows."""
    prepare: PrepareConfig = PrepareConfig()
    """Creates the data files whose settings are empty. The value is a preparation's name, as in `prepare = "gsm8k"`, or
    a table with name, source, revision and settings."""
    columns: dict[RowFile, dict[str, ColumnType]] = Field(default_factory=dict)
    """Types of the CSV columns of each file, by setting. The types can also be given in the file's own setting:
    `prompts = {path = "prompts.csv", columns = {level = "int"}}`. Columns that are not listed are text."""

    def columns_of(self, name: RowFile) -> dict[str, ColumnType]:
        return self.columns.get(name, {})

    @model_validator(mode="before")
    @classmethod
    def _read_tables(cls, settings: Any) -> Any:  # Any: unchecked input
        """Accept a table with a path and the types of its columns in place of a file's path."""
        if not isinstance(settings, dict):
            return settings
        flat = dict(settings)
        if isinstance(given := flat.get("sft"), dict):
            flat["sft"] = (given,)
        if isinstance(given := flat.get("prepare"), str):
            flat["prepare"] = {"name": given}
        tables = {name: flat[name] for name in get_args(RowFile) if isinstance(flat.get(name), dict)}
        misfits = [name for name, table in tables.items() if table.keys() - {"path", "columns"} or "path" not in table]
        if misfits:
            raise ValueError(
                "\n".join(
                    f"{name}: expected a path, or a table with path and columns; "
                    f"found {', '.join(map(str, tables[name])) or 'nothing'}"
                    for name in misfits
                )
            )
        for name, table in tables.items():
            flat[name] = table["path"]
            if "columns" in table:
                flat["columns"] = {**flat.get("columns", {}), name: table["columns"]}
        return flat
