"""Replies of devices -> training -> adapted models and metrics: the model owner's side of Cutlayer.

What two machines must agree on is left to `contract`; cutting models to `exporter`.
"""
