"""Download a model from the Hugging Face hub at one commit, or look up the commit of a model or dataset.

    python -P -m rollouts_core.data.hub_download find NAME REVISION            prints {"commit": ..., "num_bytes": ...}
    python -P -m rollouts_core.data.hub_download fetch NAME COMMIT FOLDER      downloads; resumes interrupted downloads
    python -P -m rollouts_core.data.hub_download dataset NAME REVISION         prints {"commit": ...}

This module runs in a separate process, because the hub's library reads its address and token when it is imported. An
error is one sentence on standard error. `tasks/hub_models.py` chooses the folder and checks the disk space.
"""

from __future__ import annotations

import json
import shutil
import sys
from fnmatch import fnmatch
from pathlib import Path

from rollouts_core.data.preparing import explain_hub_error

PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "LICENSE*")
"""Files of a model to download. The same weights in other formats are not downloaded."""
LEFT_OUT = ("onnx/*", "original/*", "coreml/*", "openvino/*")


def find_model(name: str, revision: str) -> dict[str, object]:
    """The commit of a model, and the total size of the files to download, bytes."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(name, revision=revision or None, files_metadata=True)
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or ()}
    return {"commit": info.sha, "num_bytes": sum(size for file, size in sizes.items() if is_wanted(file))}


def find_dataset(name: str, revision: str) -> dict[str, object]:
    from huggingface_hub import HfApi

    return {"commit": HfApi().dataset_info(name, revision=revision or None).sha}


def is_wanted(file: str) -> bool:
    is_left_out = any(fnmatch(file, pattern) for pattern in LEFT_OUT)
    return not is_left_out and any(fnmatch(file, pattern) for pattern in PATTERNS)


def fetch_model(name: str, commit: str, folder: Path) -> None:
    """Download the files of a model into a folder. Files that are already complete there are not downloaded again."""
    from huggingface_hub import snapshot_download

    allowed, left_out = [*PATTERNS], [*LEFT_OUT]
    snapshot_download(name, revision=commit, local_dir=folder, allow_patterns=allowed, ignore_patterns=left_out)
    shutil.rmtree(folder / ".cache", ignore_errors=True)


def main() -> int:
    """Run the command given by the arguments. The module's docstring lists the commands."""
    verb, name, revision = sys.argv[1:4]
    try:
        if verb == "fetch":
            fetch_model(name, revision, Path(sys.argv[4]))
        else:
            found = find_model(name, revision) if verb == "find" else find_dataset(name, revision)
            sys.stdout.write(json.dumps(found) + "\n")
    except Exception as error:  # the hub's library raises its own errors and those of its HTTP library
        raise SystemExit(explain_hub_error("dataset" if verb == "dataset" else "model", name, error)) from error
    return 0


if __name__ == "__main__":
    sys.exit(main())
