"""Run every benchmark that needs no GPU and put its tables into docs/benchmarks.md.

    python benchmarks/run_all.py [--out docs/benchmarks.md] [--only GRPO] [--quick]

Run it on a machine that does nothing else: about half an hour on two cores. `--quick` takes two rounds of everything,
to see that it runs. Sections of the document that were not run, or need programs that are not here (sshd, rsync), are
left as they are.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from side_by_side import REPOSITORY, SKIPPED, worker_environment

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
SFT_20M = "ours,ours bf16,bare packed,trl,trl grouped,trl bfd,trl bfd by row,trl wrapped,hf"
PACKED = "ours,bare packed,bare packed|memory=kept,trl wrapped,trl bfd by row"
RUNS = (
    ("SFT, 1M parameters", "sft_speed.py --size 1M --turn-s 2 --rounds 5"),
    ("SFT, 1M parameters, packed peers", f"sft_speed.py --size 1M --turn-s 2 --rounds 7 --contenders '{PACKED}'"),
    ("SFT, 20M parameters", f"sft_speed.py --size 20M --turn-s 3 --rounds 4 --contenders '{SFT_20M}'"),
    ("GRPO step, 0.16M parameters", "grpo_speed.py --size 0.16M --turn-s 2 --rounds 5"),
    ("GRPO step, 1M parameters", "grpo_speed.py --size 1M --turn-s 3 --rounds 5"),
    ("GRPO step, 20M parameters", "grpo_speed.py --size 20M --turn-s 1 --rounds 3"),
    ("GRPO step, 20M parameters, bfloat16", "grpo_speed.py --size 20M --turn-s 1 --rounds 3 --dtype bf16"),
    ("RL ahead of the trainer", "async_rl.py --rounds 3"),
    ("RL ahead of the trainer, graded elsewhere", "async_rl.py --rounds 3 --steps 20 --grade-s 0.3"),
    ("Memory of the loss", "loss_memory.py"),
    ("Cost of a save", "save_cost.py --rounds 5"),
    ("Publishing weights, 1M parameters", "weight_sync.py --size 1M"),
    ("Publishing weights, 20M parameters", "weight_sync.py --size 20M"),
    ("Files over SSH, loopback", "transfer.py --megabytes 1024 --files 2000 --rounds 3 --folder /dev/shm"),
    ("Files over SSH, 50 ms away", "transfer.py --megabytes 1024 --files 2000 --round-trip-ms 50 --rounds 2"),
    ("Back to a job over SSH, 50 ms away", "attach.py --round-trip-ms 50 --rounds 5"),
    ("Start of short commands", "command_start.py --rounds 9"),
    ("Chat templates of the hub", "chat_templates.py"),
)
"""Title and command of each section, in the order of the document."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="document whose figures are replaced (default: only print them)")
    parser.add_argument("--threads", type=int, default=2, help="threads of every contender (default: 2)")
    parser.add_argument("--only", default="", help="run the sections whose titles have this in them (default: all)")
    parser.add_argument("--quick", action="store_true", help="two rounds of everything")
    options = parser.parse_args()
    began = time.monotonic()
    for title, command in RUNS:
        if options.only not in title:
            continue
        section = run_section(title, command, quick=options.quick, num_threads=options.threads)
        if section is None:
            continue
        print(f"{section}\n", flush=True)
        if options.out is not None:
            replace_section(options.out, title, section)
    print(f"{time.monotonic() - began:.0f} s in all")


def run_section(title: str, command: str, *, quick: bool, num_threads: int) -> str | None:
    """Title, command and output of one benchmark; None, and it has said why, when it cannot run on this machine."""
    print(f"{title} ...", file=sys.stderr, flush=True)
    words = [*shlex.split(command), "--threads", str(num_threads)]
    if quick and "--rounds" in words:
        words[words.index("--rounds") + 1] = "2"
    answer = subprocess.run(
        [sys.executable, f"benchmarks/{words[0]}", *words[1:]],
        cwd=REPOSITORY,
        env=worker_environment(num_threads),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if answer.returncode == SKIPPED:
        return None
    answer.check_returncode()
    return f"### {title}\n\n`python benchmarks/{command}`\n\n{answer.stdout.strip()}"


def replace_section(document: Path, title: str, section: str) -> None:
    """Put a section between the document's markers, in the place of the one with its title, or in the order of RUNS."""
    before, rest = document.read_text().split(BEGIN)
    figures, after = rest.split(END)
    sections = {part.partition("\n")[0]: f"### {part.strip()}" for part in figures.split("### ")[1:]}
    sections[title] = section
    order = [known for known, _ in RUNS]
    titles = sorted(sections, key=lambda each: order.index(each) if each in order else len(order))
    text = "\n\n".join(sections[each] for each in titles)
    document.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
