"""A frozen transformer, tuned to private text through adapters whose updates nobody sees."""
