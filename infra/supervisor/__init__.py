"""Keep one program running on a node, detached from whoever asked for it, and write down how it ended.

The node's side of jobs.py. Runs as `python supervisor VERB RUN_DIR ...`; standard library only, because it is sent to
nodes by content (node_programs.py). Not here: what the program does, how a node is reached (session.py).

    start RUN_DIR (spec on stdin) ── finished? alive? ── no: fork ── supervisor ── the program, its own session
    status RUN_DIR                                                    │ holds .job/lock for its whole life, so the
    follow RUN_DIR LOG METRICS EVENTS (offsets) [STORE]               │ kernel tells if it lives, even after kill -9
    cancel RUN_DIR GRACE_S MAX_GRACE_S WAIT_S ATTEMPT [STORE]         └ writes exit-<n>.json for attempt n, last
    renew RUN_DIR
    finish RUN_DIR ASKED_BY
    tail RUN_DIR MAX_BYTES

Each verb but `follow` prints one JSON object, `{"error": sentence}` with exit code 1 when it refuses. In RUN_DIR:

    job.json      what is to be done; written by start for each attempt, because ports and other placements that are
                  no part of the job's identity may change between attempts; never touched while the job lives
    log.txt       what the program wrote to stdout and stderr, raw, over all attempts
    exit-<n>.json how attempt n ended
    finish-<n>    who asks the program of attempt n to end by itself, with what it has; programs need not heed it
    stop.json     written by a program that saves what it has when it gets SIGTERM: its process, how long that takes,
                  which step is saved. SIGKILL comes after that time; the program's other processes get no SIGTERM
    stop-<n>      how many seconds the program of attempt n has for that; there before it gets SIGTERM
    result.json   written by the program, last: the job is finished
    .job/         lock, start.lock, lease, meta-<n>.json, cancel-<n>, spare-<n> (becomes that where the disk takes no
                  more files), ending-<n> (a limit of attempt n is reached), supervisor-<n>.txt (our own failures),
                  followed-<store> (locked by each process that follows the job for a run of that store)

The program's processes are found as descendants of the supervisor and, when that is gone, by the variable
ROLLOUTS_JOB=<run directory> in their environment. Where there is no /proc (macOS), by the program's process group.
The run directory has to be on a disk whose flock() works between the processes of the node.

A job that was given GPUs begins when no other has them: see GPUSlots. While it waits it is RUNNING, without a pid.

    verbs ─┬─ start ── supervise ─┬─ program ── output        spec       what a client asks for
           ├─ status              ├─ gpu_slots                files      of a run directory
           ├─ follow              └─ stop_requests            processes  of a job, variables
           └─ cancel
"""
