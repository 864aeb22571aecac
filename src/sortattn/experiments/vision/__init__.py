"""The paper's Appendix E: a small vision transformer on CIFAR-10, from scratch and distilled from softmax (Table 6)."""
