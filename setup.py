"""Metadata is in pyproject.toml; here is what is compiled. Without a compiler, the package does without it."""

from setuptools import Extension, setup

setup(ext_modules=[Extension("ogc.plan._replay", ["ogc/plan/replay.c"], optional=True)])
