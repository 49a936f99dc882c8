"""Handwritten digits, learned by clients whose updates nobody sees."""
