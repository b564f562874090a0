"""From prompts to batches of graded groups: asking engines, conversations, carrying over."""
