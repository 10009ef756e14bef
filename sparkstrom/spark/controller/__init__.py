"""The controller in a Spark task: its place, its task, and what stands for it in the driver."""
