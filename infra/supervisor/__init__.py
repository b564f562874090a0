"""Keep one program running on a node, detached from its client, and record how it ended.

This package is the node's side of jobs.py. The package runs as `python supervisor VERB RUN_DIR ...`. The package uses
only the standard library, because its text is sent to nodes (node_programs.py). Not here: the program's work, sessions
(session.py).

    start RUN_DIR (spec on stdin) ── finished? alive? ── no: fork ── supervisor ── the program, in a new session
    status RUN_DIR                                                    │ locks .job/lock until its end, so the kernel
    follow RUN_DIR LOG METRICS EVENTS (offsets) [STORE]               │ frees the lock also after kill -9
    cancel RUN_DIR GRACE_S MAX_GRACE_S WAIT_S ATTEMPT [STORE]         └ writes exit-<n>.json for attempt n, last
    renew RUN_DIR
    finish RUN_DIR ASKED_BY
    tail RUN_DIR MAX_BYTES

Each verb except `follow` prints one JSON object. A verb that fails prints `{"error": sentence}` and exits with code 1.
Files in RUN_DIR:

    job.json      the job's input. Each start of an attempt writes this file, because ports and placements may change
                  between attempts. A changed placement does not change the job's identity. The file stays unchanged
                  while the job is running
    log.txt       the program's raw stdout and stderr of all attempts
    exit-<n>.json how attempt n ended
    finish-<n>    asks the program of attempt n to finish early with its present result; the program may ignore it
    stop.json     written by a program that saves its state on SIGTERM: its process, the needed time, and the saved
                  step. The named process alone gets SIGTERM, and SIGKILL follows after the needed time
    stop-<n>      the seconds that the program of attempt n has for saving; written before SIGTERM
    result.json   written by the program, last; it marks the job as finished
    .job/         lock, start.lock, lease, meta-<n>.json, cancel-<n>, spare-<n> (renamed to cancel-<n> if the disk takes
                  no more files), ending-<n> (attempt n has reached a limit), supervisor-<n>.txt (the supervisor's own
                  errors), followed-<store> (locked by each process that follows the job for a run of that store)

The program's processes are the descendants of the supervisor. If the supervisor has died, these processes are found by
the variable ROLLOUTS_JOB=<run directory> in their environment. On systems without /proc (macOS), these processes are
found by the program's process group. The disk of the run directory must support flock() between the processes of the
node.

A job with GPUs starts when no other job holds its GPUs (see GPUSlots). While the job waits, its state is RUNNING and
the job has no pid.

    verbs ─┬─ start ── supervise ─┬─ program       spec       a client's request
           └─ status              └─ gpu_slots     files      of a run directory
                                                   processes  of a job
"""
