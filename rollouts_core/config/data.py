"""`data`: the files of demonstrations and prompts."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, JsonValue, WithJsonSchema, model_validator

from rollouts_core.config.record import PLACEMENT, Finite, FunctionName, Record

ColumnType = Literal["text", "int", "float", "bool", "json"]
"""Types of a CSV column."""
RowFile = Literal["sft_eval", "prompts", "selection", "heldout"]
"""Settings for one file of rows."""


class DatasetConfig(Record):
    """One of several datasets of demonstrations that are trained on together."""

    path: str = Field(min_length=1, json_schema_extra=PLACEMENT)
    """JSONL, JSON, CSV or Parquet file, folder of such files or of a Hugging Face dataset, or hub id."""
    split: str = Field(default="train", min_length=1)
    """Split of a folder or hub dataset with several splits."""
    subset: str = ""
    """Configuration of a hub dataset with several configurations."""
    revision: str = Field(default="", json_schema_extra=PLACEMENT)
    """Commit or tag of a hub dataset; empty takes the newest commit when the run is planned."""
    max_samples: int | None = Field(default=None, ge=1)
    """Use only the first rows, up to this number."""
    repeat: Annotated[Finite, Field(gt=0)] = 1.0
    """Visits of each row per epoch. Below 1 an epoch takes this share of the rows, and the next epoch takes others."""
    columns: dict[str, ColumnType] = Field(default_factory=dict)
    """Types of CSV columns, by their names: text, int, float, bool or json. Other columns are text."""


class PrepareConfig(Record):
    """How the data files are made from a public dataset, once, before the run."""

    name: FunctionName = ""
    """A name of `rollouts_core.data.preparations.PREPARATIONS` or `package.module:function`. Empty: no preparation."""
    source: str = ""
    """Public dataset: hub id, or folder of a downloaded dataset. Empty: the dataset in the preparation."""
    revision: str = ""
    """Commit or tag of a hub dataset. Empty: the commit in the preparation, or the newest commit of another
    `source`."""
    settings: Annotated[dict[str, JsonValue], WithJsonSchema({"type": "object"})] = Field(default_factory=dict)
    """Keyword arguments of the function, as in `{ num_selection = 100 }`."""


class DataConfig(Record):
    """Files of demonstrations and prompts. Paths are relative to the configuration's file; in a pipeline they
    may also be URLs in an object store, s3://bucket/data/sft.jsonl."""

    sft: str | tuple[DatasetConfig, ...] = ""
    """Demonstrations: rows with `messages`, with `prompt` and `completion`, or with `text`. One JSONL, JSON, CSV
    or Parquet file, dataset folder or hub id; or a list of such datasets, each with its share."""
    streaming: bool = Field(default=False, json_schema_extra=PLACEMENT)
    """Read and tokenize demonstrations while training instead of before: for data larger than memory."""
    sft_eval: str = ""
    """Demonstrations whose loss is measured during SFT, without training on them. Empty: no measurement."""
    prompts: str = ""
    """Prompts for RL: rows with `prompt` or `messages`, and `answer` if the reward needs it. One JSONL, JSON, CSV
    or Parquet file, or dataset folder."""
    rollouts: str = ""
    """Recorded rollouts for RL, instead of prompts and engines: the folder `samples` of an earlier RL stage. Its steps
    are trained on in order. Each step is one batch, regardless of `rollout.batch_size`."""
    selection: str = ""
    """Prompts, or with `evaluation.metric = "loss"` demonstrations, that choose between checkpoints."""
    heldout: str = ""
    """Prompts, or with `evaluation.metric = "loss"` demonstrations, for the report. The selection must not contain
    any of its rows."""
    prepare: PrepareConfig = PrepareConfig()
    """Creates the files above that are left empty: `prepare = "gsm8k"`, or a table with name, source, revision and
    settings."""
    columns: dict[RowFile, dict[str, ColumnType]] = Field(default_factory=dict)
    """Types of CSV columns of the files above, by setting. A file's own table sets them: `prompts = {path =
    "prompts.csv", columns = {level = "int"}}`. Other columns are text."""

    def columns_of(self, name: RowFile) -> dict[str, ColumnType]:
        """The CSV column types of the file in a setting."""
        return self.columns.get(name, {})

    @model_validator(mode="before")
    @classmethod
    def _read_tables(cls, settings: Any) -> Any:  # Any: unchecked input
        """Accept a table instead of a file's path, with the path and the types of its columns."""
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
