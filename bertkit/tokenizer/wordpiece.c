/* WordPiece ids of texts by BERT's rules, in one pass over their UTF-8 (compiled.py).

What a character becomes is computed in Python, and only for the characters that occur: its
replacement after cleaning, lower-casing, decomposing and splitting, in which a space ends a word.
The rules are kept in pages of 256 code points, which all tokenizers share. A text with a
character whose replacement depends on other characters is left to the library. A word is split into
tokens when it is first met, and then remembered.

One thread at a time may use a tokenizer. Functions return OUT_OF_MEMORY if there is no memory.
*/

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 256, MOST_BYTES = 15, UNKNOWN = 254, IN_CONTEXT = 255 };
enum { WORDS = 1 << 18, WORD_SLOTS = 2 * WORDS, REMEMBERED_BYTES = 64, BYTES = 16 * WORDS };
enum { FILTER_BITS = 1 << 19 };
enum { OUT_OF_MEMORY = -1, SPECIALS = 5 };

/* Each is one token where it stands in a text. */
static const char *const special_tokens[SPECIALS] = {"[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"};

/* What a character becomes: `size` bytes, UNKNOWN as yet, or IN_CONTEXT. */
typedef struct {
    uint8_t size, bytes[MOST_BYTES];
} Rule;

/* A token of the vocabulary without its "##"; `size` is 0 in a free slot. */
typedef struct {
    uint64_t hash;
    const uint8_t *bytes;
    int32_t size, id;
} Piece;

/* A remembered word; `size` is 0 in a free slot. What is most often needed stands in the slot. */
typedef struct {
    uint64_t head;     /* its first eight bytes */
    uint32_t key;      /* where those after them begin in `keys` */
    uint32_t first;    /* where its ids begin in `remembered`, or its id if it has one */
    uint16_t size, count;
} Word;

typedef struct {
    Rule *const *pages;       /* Python's, NULL where no rule is known yet */
    int lowercase;            /* whether letters of ASCII become lower-case */
    uint64_t filter[FILTER_BITS / 64]; /* of hashes: without its bit, there is no such token */
    Piece *pieces;
    uint8_t *piece_bytes;
    int32_t *piece_characters;
    int64_t piece_mask, longest_piece, most_characters;
    int32_t special[SPECIALS]; /* the ids of `special_tokens` */
    uint64_t seed;

    Word *words;
    uint8_t *keys;
    int32_t *remembered;
    int64_t word_count, key_bytes, remembered_count;

    /* The word that is being read: its bytes, and the index in the text of each character. */
    uint8_t *word;
    int32_t *sources;
    int64_t size, characters, space;

    /* For splitting it: ends and hashes of what may be a token, and the tokens. */
    int32_t *ends, *split;
    uint64_t *hashes;

    int32_t *ids, *spans;
    int64_t count, ids_space;
} Tokenizer;

static const uint64_t FNV_OFFSET = 14695981039346656037u, FNV_PRIME = 1099511628211u;

static int is_inside_character(uint8_t byte) { return (byte & 0xC0) == 0x80; }

/* The hash of no bytes yet, at the beginning of a word or within one. */
static uint64_t empty_hash(int continues) { return FNV_OFFSET + (uint64_t)continues; }

static uint64_t add_byte(uint64_t hash, uint8_t byte) { return (hash ^ byte) * FNV_PRIME; }

static int64_t slot_of(uint64_t hash, int64_t mask) {
    return (int64_t)((hash ^ (hash >> 29)) & (uint64_t)mask);
}

/* The slot of a token, or the free one where it belongs. */
static Piece *find_piece(const Tokenizer *tokenizer, const uint8_t *bytes, int64_t size,
                         uint64_t hash) {
    for (int64_t slot = slot_of(hash, tokenizer->piece_mask);; slot++) {
        Piece *piece = &tokenizer->pieces[slot & tokenizer->piece_mask];
        if (!piece->size || (piece->hash == hash && piece->size == size &&
                             !memcmp(piece->bytes, bytes, (size_t)size)))
            return piece;
    }
}

/* The hash of a word, and its first eight bytes. */
static uint64_t hash_word(const uint8_t *bytes, int64_t size, uint64_t seed, uint64_t *head) {
    const uint64_t factor = 0x9E3779B97F4A7C15u;
    uint64_t hash = seed ^ (uint64_t)size;
    for (int64_t i = 0; i < size; i += 8) {
        uint64_t eight;
        memcpy(&eight, bytes + i, 8); /* there is room for it */
        if (size - i < 8)
            eight &= ((uint64_t)1 << 8 * (size - i)) - 1;
        if (!i)
            *head = eight;
        hash = (hash ^ eight) * factor;
        hash ^= hash >> 32;
    }
    return hash;
}

/* Make room for a word of some more bytes. */
static int grow_word(Tokenizer *tokenizer, int64_t more) {
    if (tokenizer->size + more <= tokenizer->space)
        return 0;
    const int64_t space = 2 * (tokenizer->size + more);
    uint8_t *word = realloc(tokenizer->word, (size_t)space + 8); /* they are written by eight */
    if (word)
        tokenizer->word = word;
    int32_t *sources = realloc(tokenizer->sources, (size_t)space * sizeof *sources);
    if (sources)
        tokenizer->sources = sources;
    int32_t *split = realloc(tokenizer->split, (size_t)space * sizeof *split);
    if (split)
        tokenizer->split = split;
    if (!word || !sources || !split)
        return OUT_OF_MEMORY;
    tokenizer->space = space;
    return 0;
}

/* Make room for the ids of some more tokens. */
static int grow_ids(Tokenizer *tokenizer, int64_t more) {
    if (tokenizer->count + more <= tokenizer->ids_space)
        return 0;
    const int64_t space = 2 * (tokenizer->count + more);
    int32_t *ids = realloc(tokenizer->ids, (size_t)space * sizeof *ids);
    if (ids)
        tokenizer->ids = ids;
    int32_t *spans = realloc(tokenizer->spans, (size_t)space * 2 * sizeof *spans);
    if (spans)
        tokenizer->spans = spans;
    if (!ids || !spans)
        return OUT_OF_MEMORY;
    tokenizer->ids_space = space;
    return 0;
}

static uint64_t *filter_word(Tokenizer *tokenizer, uint64_t hash) {
    return &tokenizer->filter[(hash >> 20) % (FILTER_BITS / 64)];
}

static uint64_t filter_bit(uint64_t hash) { return (uint64_t)1 << (hash >> 58); }

/* Split the word into `split`, the longest token first (BERT's WordPiece); return their number. */
static int64_t split_word(Tokenizer *tokenizer) {
    const uint8_t *word = tokenizer->word;
    int64_t start = 0, count = 0;
    while (start < tokenizer->size) {
        int64_t most = tokenizer->size - start, found = 0;
        if (most > tokenizer->longest_piece)
            most = tokenizer->longest_piece;
        uint64_t hash = empty_hash(start > 0);
        for (int64_t i = 0; i < most; i++) {
            hash = add_byte(hash, word[start + i]);
            const int64_t next = start + i + 1;
            if ((next == tokenizer->size || !is_inside_character(word[next])) &&
                *filter_word(tokenizer, hash) & filter_bit(hash)) {
                tokenizer->ends[found] = (int32_t)(i + 1);
                tokenizer->hashes[found++] = hash;
            }
        }
        const Piece *piece = NULL;
        while (found && !(piece && piece->size)) {
            found--;
            piece = find_piece(tokenizer, word + start, tokenizer->ends[found],
                               tokenizer->hashes[found]);
        }
        if (!piece || !piece->size) {
            tokenizer->split[0] = tokenizer->special[1];
            return 1;
        }
        tokenizer->split[count++] = piece->id;
        start += piece->size;
    }
    return count;
}

/* Return the slot of the word that was read, which is remembered if it was not. */
static const Word *remembered_word(Tokenizer *tokenizer) {
    const int64_t size = tokenizer->size;
    uint64_t head = 0;
    const uint64_t hash = hash_word(tokenizer->word, size, tokenizer->seed, &head);
    const int64_t home = slot_of(hash, WORD_SLOTS - 1);
    Word *word = &tokenizer->words[home];
    for (int64_t slot = home + 1; word->size; slot++) {
        if (word->head == head && word->size == size &&
            (size <= 8 || !memcmp(tokenizer->keys + word->key, tokenizer->word + 8, (size_t)size - 8)))
            return word;
        word = &tokenizer->words[slot & (WORD_SLOTS - 1)];
    }
    const int64_t count = split_word(tokenizer), more = size > 8 ? size - 8 : 0;
    if (tokenizer->word_count == WORDS || tokenizer->key_bytes + more > BYTES ||
        tokenizer->remembered_count + count > BYTES) {
        memset(tokenizer->words, 0, WORD_SLOTS * sizeof(Word));
        tokenizer->word_count = tokenizer->key_bytes = tokenizer->remembered_count = 0;
        word = &tokenizer->words[home];
    }
    memcpy(tokenizer->keys + tokenizer->key_bytes, tokenizer->word + 8, (size_t)more);
    memcpy(tokenizer->remembered + tokenizer->remembered_count, tokenizer->split,
           (size_t)count * sizeof(int32_t));
    *word = (Word){head, (uint32_t)tokenizer->key_bytes,
                   (uint32_t)(count > 1 ? tokenizer->remembered_count : tokenizer->split[0]),
                   (uint16_t)size, (uint16_t)count};
    tokenizer->word_count++;
    tokenizer->key_bytes += more;
    tokenizer->remembered_count += count;
    return word;
}

/* Set the ids of the word that was read, which are valid until the next call; return how many. */
static int64_t word_ids(Tokenizer *tokenizer, const int32_t **ids) {
    *ids = tokenizer->split;
    if (tokenizer->characters > tokenizer->most_characters) {
        tokenizer->split[0] = tokenizer->special[1];
        return 1;
    }
    if (tokenizer->size > REMEMBERED_BYTES)
        return split_word(tokenizer);
    const Word *word = remembered_word(tokenizer);
    if (word->count > 1)
        *ids = tokenizer->remembered + word->first;
    else
        tokenizer->split[0] = (int32_t)word->first;
    return word->count;
}

/* Set the spans of the tokens that the word became: half-open, in characters of the text. */
static void set_spans(Tokenizer *tokenizer, const int32_t *ids, int64_t count) {
    int32_t *span = tokenizer->spans + 2 * tokenizer->count;
    int64_t begin = 0;
    for (int64_t i = 0; i < count; i++, span += 2) {
        const int64_t end =
            count > 1 ? begin + tokenizer->piece_characters[ids[i]] : tokenizer->characters;
        span[0] = tokenizer->sources[begin];
        span[1] = tokenizer->sources[end - 1] + 1;
        begin = end;
    }
}

/* Append the tokens of the word that was read, if there is one, and begin the next. */
static int end_word(Tokenizer *tokenizer, int with_spans) {
    if (!tokenizer->characters)
        return 0;
    const int32_t *ids;
    const int64_t count = word_ids(tokenizer, &ids);
    if (grow_ids(tokenizer, count))
        return OUT_OF_MEMORY;
    for (int64_t i = 0; i < count; i++)
        tokenizer->ids[tokenizer->count + i] = ids[i];
    if (with_spans)
        set_spans(tokenizer, ids, count);
    tokenizer->count += count;
    tokenizer->size = tokenizer->characters = 0;
    return 0;
}

/* Append what the character at an index of the text became; its words may end within. */
static int add_replacement(Tokenizer *tokenizer, const Rule *rule, int32_t source,
                           int with_spans) {
    if (grow_word(tokenizer, MOST_BYTES))
        return OUT_OF_MEMORY;
    for (int i = 0; i < rule->size; i++) {
        const uint8_t byte = rule->bytes[i];
        if (byte == ' ') {
            if (end_word(tokenizer, with_spans))
                return OUT_OF_MEMORY;
            continue;
        }
        if (!is_inside_character(byte))
            tokenizer->sources[tokenizer->characters++] = source;
        tokenizer->word[tokenizer->size++] = byte;
    }
    return 0;
}

/* Append the special token that a text begins with; return its bytes, 0 if it begins with none. */
static int64_t add_special(Tokenizer *tokenizer, const uint8_t *text, const uint8_t *end,
                           int32_t source, int with_spans) {
    for (int i = 0; i < SPECIALS; i++) {
        const int64_t size = (int64_t)strlen(special_tokens[i]);
        if (end - text < size || memcmp(text, special_tokens[i], (size_t)size))
            continue;
        if (end_word(tokenizer, with_spans) || grow_ids(tokenizer, 1))
            return OUT_OF_MEMORY;
        tokenizer->ids[tokenizer->count] = tokenizer->special[i];
        if (with_spans) {
            tokenizer->spans[2 * tokenizer->count] = source;
            tokenizer->spans[2 * tokenizer->count + 1] = source + (int32_t)size;
        }
        tokenizer->count++;
        return size;
    }
    return 0;
}

/* The number of letters and digits of ASCII that eight bytes begin with; lower-case them if asked. */
static int64_t ascii_letters(uint64_t *eight, int lowercase) {
    const uint64_t each = 0x0101010101010101u, high = 0x80 * each;
    const uint64_t low = *eight & ~high, folded = low | 0x20 * each;
    /* The high bit of a byte says whether it is in a range: at least its first, not above its last. */
    const uint64_t alphabetic =
        (folded + (0x80 - 'a') * each) & ~(folded + (0x7F - 'z') * each) & ~*eight & high;
    const uint64_t digit = (low + (0x80 - '0') * each) & ~(low + (0x7F - '9') * each) & ~*eight & high;
    const uint64_t others = ~(alphabetic | digit) & high;
    if (lowercase)
        *eight |= alphabetic >> 2;
    return others ? __builtin_ctzll(others) / 8 : 8;
}

/* Append the letters that a text begins with, of which the first has an index; return how many.

There is room for them, and eight bytes of the text can always be read.
*/
static int64_t add_letters(Tokenizer *tokenizer, const uint8_t *text, const uint8_t *end,
                           int32_t source, int with_spans) {
    const uint8_t *const start = text;
    uint8_t *word = tokenizer->word + tokenizer->size;
    for (int64_t found = 8; found == 8 && text < end; word += found, text += found) {
        uint64_t eight;
        memcpy(&eight, text, 8);
        found = ascii_letters(&eight, tokenizer->lowercase);
        memcpy(word, &eight, 8);
        if (found > end - text)
            found = end - text;
    }
    const int64_t count = text - start;
    for (int64_t i = 0; with_spans && i < count; i++)
        tokenizer->sources[tokenizer->characters + i] = source + (int32_t)i;
    tokenizer->size += count;
    tokenizer->characters += count;
    return count;
}

/* Read a code point of valid UTF-8 (in which surrogates may be encoded, too). */
static uint32_t read_character(const uint8_t **text) {
    const uint8_t *byte = *text;
    const int more = *byte < 0x80 ? 0 : *byte < 0xE0 ? 1 : *byte < 0xF0 ? 2 : 3;
    uint32_t character = more ? *byte & (0x3Fu >> more) : *byte;
    for (int i = 1; i <= more; i++)
        character = character << 6 | (byte[i] & 0x3Fu);
    *text += 1 + more;
    return character;
}

/* The rule of a character; NULL if it is not known yet. */
static const Rule *find_rule(const Tokenizer *tokenizer, uint32_t character) {
    const Rule *page = __atomic_load_n(&tokenizer->pages[character / PAGE], __ATOMIC_ACQUIRE);
    const Rule *rule = page ? &page[character % PAGE] : NULL;
    return rule && __atomic_load_n(&rule->size, __ATOMIC_ACQUIRE) != UNKNOWN ? rule : NULL;
}

/* Set a rule that is not known yet, while other threads may read; pages are never freed. */
int64_t bertkit_set_rule(Rule **pages, int64_t character, const uint8_t *bytes, int64_t size) {
    Rule *page = pages[character / PAGE];
    if (!page) {
        page = calloc(PAGE, sizeof *page);
        if (!page)
            return OUT_OF_MEMORY;
        for (int i = 0; i < PAGE; i++)
            page[i].size = UNKNOWN;
        __atomic_store_n(&pages[character / PAGE], page, __ATOMIC_RELEASE);
    }
    Rule *rule = &page[character % PAGE];
    if (size <= MOST_BYTES)
        memcpy(rule->bytes, bytes, (size_t)size);
    __atomic_store_n(&rule->size, (uint8_t)size, __ATOMIC_RELEASE);
    return 0;
}

enum { TEXT_DONE, TEXT_NEEDS_RULES, TEXT_IN_CONTEXT };

static int encode_text(Tokenizer *tokenizer, const uint8_t *text, const uint8_t *end,
                       int with_spans) {
    tokenizer->size = tokenizer->characters = 0;
    for (int32_t source = 0; text < end; source++) {
        if (grow_word(tokenizer, end - text))
            return OUT_OF_MEMORY;
        const int64_t count = add_letters(tokenizer, text, end, source, with_spans);
        text += count;
        source += (int32_t)count;
        if (text == end)
            break;
        if (*text == ' ') {
            if (end_word(tokenizer, with_spans))
                return OUT_OF_MEMORY;
            text++;
            continue;
        }
        if (*text == '[') {
            const int64_t size = add_special(tokenizer, text, end, source, with_spans);
            if (size < 0)
                return OUT_OF_MEMORY;
            if (size) {
                text += size;
                source += (int32_t)size - 1;
                continue;
            }
        }
        const Rule *rule = find_rule(tokenizer, read_character(&text));
        if (!rule)
            return TEXT_NEEDS_RULES;
        if (rule->size == IN_CONTEXT)
            return TEXT_IN_CONTEXT;
        if (add_replacement(tokenizer, rule, source, with_spans))
            return OUT_OF_MEMORY;
    }
    return end_word(tokenizer, with_spans);
}

/* Encode texts, from the one with the index `first`; the ids of those before it are kept.

Args:
    text: the texts as UTF-8, one after the other, and eight bytes more; `ends` has the end of each.
    lengths: gets the number of tokens of each text, or -1 if it is left to the library.
    with_spans: whether spans are wanted, too.

Returns `count`, or the index of the first text with a character whose rule is not known yet.
*/
int64_t bertkit_encode(Tokenizer *tokenizer, const uint8_t *text, const int64_t *ends,
                       int64_t first, int64_t count, int64_t *lengths, int64_t with_spans) {
    if (!first)
        tokenizer->count = 0;
    for (int64_t i = first; i < count; i++) {
        const int64_t before = tokenizer->count;
        const int state =
            encode_text(tokenizer, text + (i ? ends[i - 1] : 0), text + ends[i], (int)with_spans);
        if (state != TEXT_DONE)
            tokenizer->count = before;
        if (state == OUT_OF_MEMORY)
            return OUT_OF_MEMORY;
        if (state == TEXT_NEEDS_RULES)
            return i;
        lengths[i] = state == TEXT_IN_CONTEXT ? -1 : tokenizer->count - before;
    }
    return count;
}

int64_t bertkit_count(const Tokenizer *tokenizer) { return tokenizer->count; }
const int32_t *bertkit_ids(const Tokenizer *tokenizer) { return tokenizer->ids; }
const int32_t *bertkit_spans(const Tokenizer *tokenizer) { return tokenizer->spans; }
const char *bertkit_source(void) { return SOURCE_HASH; }

void bertkit_free(Tokenizer *tokenizer) {
    if (!tokenizer)
        return;
    void *const all[] = {tokenizer->pieces, tokenizer->piece_bytes, tokenizer->piece_characters,
                         tokenizer->words, tokenizer->keys, tokenizer->remembered, tokenizer->word,
                         tokenizer->sources, tokenizer->ends, tokenizer->split, tokenizer->hashes,
                         tokenizer->ids, tokenizer->spans};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
    free(tokenizer);
}

/* Make a tokenizer; NULL if there is no memory.

Args:
    pages: the rules, by code point / PAGE, among them those of ASCII; they must outlive the
        tokenizer.
    vocabulary: the tokens as UTF-8, without "##", one after the other; `ends` has the end of each.
    continues: whether each token continues a word.
    characters: how many characters each token has.
    most_characters: the longest word; longer ones become [UNK].
    special: the ids of `special_tokens`.
    seed: a random number, so that nobody can choose words whose hashes are equal.
*/
Tokenizer *bertkit_new(Rule *const *pages, const uint8_t *vocabulary, const int64_t *ends,
                       const uint8_t *continues, const int32_t *characters, int64_t count,
                       int64_t most_characters, const int32_t *special, uint64_t seed) {
    Tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    if (!tokenizer)
        return NULL;
    int64_t slots = 2, bytes = ends[count - 1];
    while (slots < 2 * count)
        slots *= 2;
    tokenizer->pages = pages;
    tokenizer->lowercase = pages[0]['A'].bytes[0] == 'a';
    tokenizer->most_characters = most_characters;
    memcpy(tokenizer->special, special, sizeof tokenizer->special);
    tokenizer->seed = seed;
    tokenizer->piece_mask = slots - 1;
    tokenizer->pieces = calloc((size_t)slots, sizeof(Piece));
    tokenizer->piece_bytes = malloc((size_t)bytes + 1);
    tokenizer->piece_characters = malloc((size_t)count * sizeof(int32_t));
    tokenizer->words = calloc(WORD_SLOTS, sizeof(Word));
    tokenizer->keys = malloc(BYTES);
    tokenizer->remembered = malloc(BYTES * sizeof(int32_t));
    for (int64_t i = 0; i < count; i++) {
        const int64_t size = ends[i] - (i ? ends[i - 1] : 0);
        if (size > tokenizer->longest_piece)
            tokenizer->longest_piece = size;
    }
    tokenizer->ends = malloc((size_t)(tokenizer->longest_piece + 1) * sizeof(int32_t));
    tokenizer->hashes = malloc((size_t)(tokenizer->longest_piece + 1) * sizeof(uint64_t));
    if (!tokenizer->pieces || !tokenizer->piece_bytes || !tokenizer->piece_characters ||
        !tokenizer->words || !tokenizer->keys || !tokenizer->remembered || !tokenizer->ends ||
        !tokenizer->hashes || grow_word(tokenizer, REMEMBERED_BYTES)) {
        bertkit_free(tokenizer);
        return NULL;
    }
    memcpy(tokenizer->piece_bytes, vocabulary, (size_t)bytes);
    memcpy(tokenizer->piece_characters, characters, (size_t)count * sizeof(int32_t));
    for (int64_t i = 0; i < count; i++) {
        const uint8_t *start = tokenizer->piece_bytes + (i ? ends[i - 1] : 0);
        const int64_t size = tokenizer->piece_bytes + ends[i] - start;
        uint64_t hash = empty_hash(continues[i]);
        for (int64_t j = 0; j < size; j++)
            hash = add_byte(hash, start[j]);
        if (!size) /* "##" alone */
            continue;
        *find_piece(tokenizer, start, size, hash) = (Piece){hash, start, (int32_t)size, (int32_t)i};
        *filter_word(tokenizer, hash) |= filter_bit(hash);
    }
    return tokenizer;
}
