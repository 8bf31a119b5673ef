"""Estimators of scikit-learn: a classifier, a regressor and a transformer of texts.

    from bertkit.sklearn import BertClassifier

    classifier = BertClassifier("MODEL", epochs=4).fit(texts, labels)
    classifier.predict(["Has the courier been here?"])

They work in pipelines, grid searches and cross-validation. A fit gives the model of
`bertkit.finetune` with the same settings and seed, and leaves no files: the estimator holds the
files of its model, so that a pickle of it needs no other file. Texts of any length are read through
windows (see `bertkit.tasks.sequences`), and a blank text is a row like any other.
"""

from bertkit.sklearn.estimators import BertClassifier, BertEmbedder, BertRegressor

__all__ = ["BertClassifier", "BertEmbedder", "BertRegressor"]
