"""The balanced tree: the only way more than two things that are not a chain are added."""
