"""Metadata and settings are in pyproject.toml."""

from setuptools import setup

setup()
