"""Contracts: what every implementation of an extension point promises, as test classes that each of them subclasses."""
