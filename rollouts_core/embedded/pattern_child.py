"""The program of the process that searches for patterns. patterns.py starts it and describes the messages.

The program imports nothing of this project and runs in an interpreter without installed packages.
"""

import json
import re
import resource
import signal
import sys
import time

MAX_MEMORY_BYTES = 1 << 30


def main() -> None:
    """Answer batches of searches until the input ends. A search that uses up its time ends this process."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the engine handles Ctrl-C, and then closes this input
    for line in sys.stdin:
        for patterns, text, limit_s in json.loads(line):
            began = time.process_time()
            signal.setitimer(signal.ITIMER_PROF, limit_s)  # Python's own handlers would not run inside a search
            found = next((pattern for pattern in patterns if re.search(pattern, text)), "")
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout.write(f"{json.dumps([found, time.process_time() - began])}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
