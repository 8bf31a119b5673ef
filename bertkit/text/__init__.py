"""Raw text: where it is, its documents, and their sentences."""

from bertkit.text.documents import TextCounts as TextCounts
from bertkit.text.documents import read_documents as read_documents
from bertkit.text.sentences import split_sentences as split_sentences
from bertkit.text.sources import Source as Source
from bertkit.text.sources import TextSource as TextSource
from bertkit.text.sources import find_sources as find_sources
