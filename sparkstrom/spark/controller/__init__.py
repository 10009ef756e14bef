"""Run a fit's controller in a Spark task instead of the driver program.

The controller (also called the master) coordinates the workers of a fit and holds a replica of the
parameters.
"""
