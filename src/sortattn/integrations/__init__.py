"""Kernel attention in the models of other libraries; each module needs its library only when it is called."""
