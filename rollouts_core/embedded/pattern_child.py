"""The child process of patterns.py: searches texts for patterns. The docstring of patterns.py shows its messages.

This script imports nothing from this project and needs no installed packages.
"""

import json
import re
import resource
import signal
import sys
import time

MAX_MEMORY_BYTES = 1 << 30


def main() -> None:
    """Answer batches of searches until stdin ends. If a search uses up its time, SIGPROF kills this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the engine closes stdin
    for line in sys.stdin:
        for patterns, text, limit_s in json.loads(line):
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, limit_s)  # no handler of SIGPROF: Python runs none during a search
            found = next((pattern for pattern in patterns if re.search(pattern, text)), "")
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout.write(f"{json.dumps([found, time.process_time() - began])}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
