"""Checks that involve several keys of a profile whose values are valid one by one."""
