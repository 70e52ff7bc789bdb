"""Metadata and settings are in pyproject.toml; what is compiled is here. Without a compiler the package does without."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("ogc.plan._replay", ["ogc/plan/replay.c"], optional=True)])
