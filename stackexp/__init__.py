"""stackexp: what does a differentiable stack between Transformer layers buy, and at what cost?"""

__version__ = "0.1.0"
