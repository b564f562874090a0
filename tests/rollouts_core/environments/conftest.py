"""Tests of the extra `verifiers` run where it is installed: it is no part of the development environment."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("verifiers") else ["test_verifiers_tasks.py"]
