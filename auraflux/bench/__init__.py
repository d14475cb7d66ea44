"""How fast the ops are here: timed beside other libraries and under the limit of the machine."""
