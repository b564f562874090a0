"""From prompts to batches of graded groups: requests to engines, conversations, scheduling, recorded rollouts."""
