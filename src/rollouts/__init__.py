"""Pipelines of SFT and RL: `flows` run `tasks` on machines of `infra`. The training library is `rollouts_core`."""
