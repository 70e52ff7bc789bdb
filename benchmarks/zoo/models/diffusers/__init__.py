"""The parts that :mod:`benchmarks.zoo.models.diffusers_family` is made of."""
