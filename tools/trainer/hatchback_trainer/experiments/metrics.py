"""AUC and log loss of scores against labels, plain Python. Never looks at a model."""

from math import log


def auc(labels, scores):
    """Returns the probability that a positive sample scores above a negative one (rank-sum
    form). Ties count half."""
    order = sorted(range(len(scores)), key=scores.__getitem__)
    positives = sum(labels)
    negatives = len(labels) - positives
    rank_sum, start = 0.0, 0
    while start < len(order):
        end = start
        while end < len(order) and scores[order[end]] == scores[order[start]]:
            end += 1
        # Tied scores share the mean of their ranks, which count from 1.
        rank = (start + 1 + end) / 2
        rank_sum += rank * sum(labels[i] for i in order[start:end])
        start = end
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def logloss(labels, scores):
    return -sum(log(s if label else 1 - s) for label, s in zip(labels, scores)) / len(labels)
