// The expressions of a language, which are Python's objects, become the numbers that closing_tree.h reads.
#include <nanobind/stl/string.h>

#include <string>
#include <unordered_map>
#include <vector>

#include "bind.h"
#include "closing_program.h"
#include "closing_tree.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace tureen {

namespace {

constexpr int MAX_DEPTH = 2000;
constexpr int TERMINAL = -1;  // the kind of what is written as its item

// Numbers the nodes of trees, each once.
class TreeWriter {
public:
    TreeWriter(const nb::dict& kinds, const nb::dict& rules, nb::callable rewritten)
        : rewritten_(std::move(rewritten)) {
        for (auto [type, kind] : kinds) kinds_[type.ptr()] = nb::cast<int>(kind);
        for (auto [name, rule] : rules) rules_.emplace(nb::cast<std::string>(name), int32_t(rules_.size()));
    }

    // The number of a node; those of its parts are lower.
    int32_t number(nb::handle node) {
        if (const auto known = by_object_.find(node.ptr()); known != by_object_.end()) return known->second;
        if (++depth_ > MAX_DEPTH) throw TooLarge("nested too deep");
        const int32_t number = added(node);
        depth_--;
        return by_object_[node.ptr()] = number;
    }

    std::vector<int32_t> numbers;  // the nodes, one behind the other

private:
    int32_t added(nb::handle node) {
        const auto kind = kinds_.find(reinterpret_cast<PyObject*>(Py_TYPE(node.ptr())));
        if (kind == kinds_.end()) throw nb::type_error("this is no part of a language");
        switch (kind->second) {
            case TERMINAL: return number(node.attr(item_));
            case TREE_TEXT: return text(node.attr(text_));
            case TREE_CALL: return add(TREE_CALL, {rules_.at(nb::cast<std::string>(node.attr(name_)))});
            case TREE_NOT:
            case TREE_FREE: return add(kind->second, {number(node.attr(item_))});
            case TREE_CHARS: {
                std::vector<int32_t> points;
                for (nb::handle span : nb::tuple(node.attr(ranges_))) {
                    points.push_back(nb::cast<int32_t>(span[0]));
                    points.push_back(nb::cast<int32_t>(span[1]));
                }
                return add(TREE_CHARS, points);
            }
            case TREE_REPEAT: {
                const nb::object most = node.attr(most_);
                return add(TREE_REPEAT, {number(node.attr(item_)), nb::cast<int32_t>(node.attr(least_)),
                                         most.is_none() ? -1 : nb::cast<int32_t>(most)});
            }
            case TREE_BOTH: {
                const nb::object other = rewritten_(node);
                if (!other.is(node)) {
                    kept_.push_back(other);
                    return number(other);
                }
                const int32_t second = number(node.attr(second_));
                return add(TREE_BOTH, {number(node.attr(first_)), second});
            }
            default: {
                const nb::tuple items = node.attr(items_);
                std::vector<int32_t> parts(items.size());
                for (size_t at = parts.size(); at-- > 0;) parts[at] = number(items[at]);
                return add(kind->second, parts);
            }
        }
    }

    int32_t text(const nb::object& text) {
        Py_ssize_t size = 0;
        const char* data = PyUnicode_AsUTF8AndSize(text.ptr(), &size);
        if (data != nullptr) return add(TREE_TEXT, std::vector<int32_t>(data, data + size), 0xFF);
        PyErr_Clear();
        return add(TREE_CHOICE, {});  // a surrogate, which no text holds
    }

    int32_t add(int32_t kind, const std::vector<int32_t>& parts, int32_t mask = -1) {
        const size_t from = numbers.size();
        numbers.push_back(kind);
        numbers.push_back(int32_t(parts.size()));
        for (int32_t part : parts) numbers.push_back(part & mask);
        std::string key(reinterpret_cast<const char*>(numbers.data() + from),
                        (numbers.size() - from) * sizeof(int32_t));
        const auto [known, is_new] = by_numbers_.try_emplace(std::move(key), int32_t(by_numbers_.size()));
        if (!is_new) numbers.resize(from);
        return known->second;
    }

    std::unordered_map<PyObject*, int> kinds_;
    std::unordered_map<std::string, int32_t> rules_;
    std::unordered_map<PyObject*, int32_t> by_object_;
    std::unordered_map<std::string, int32_t> by_numbers_;  // as they are written
    std::vector<nb::object> kept_;                         // so that no other object takes their places
    nb::callable rewritten_;
    int depth_ = 0;
    const nb::str text_{"text"}, ranges_{"ranges"}, items_{"items"}, item_{"item"}, least_{"least"}, most_{"most"},
        first_{"first"}, second_{"second"}, name_{"name"};
};

nb::bytes tree_of(const nb::dict& rules, const nb::list& starts, const nb::dict& kinds, nb::callable rewritten) {
    TreeWriter writer(kinds, rules, std::move(rewritten));
    std::vector<int32_t> head{int32_t(rules.size())};
    for (auto [name, rule] : rules) head.push_back(writer.number(rule));
    head.push_back(int32_t(starts.size()));
    for (nb::handle start : starts) head.push_back(writer.number(start));
    head.insert(head.end(), writer.numbers.begin(), writer.numbers.end());
    return nb::bytes(reinterpret_cast<const char*>(head.data()), head.size() * sizeof(int32_t));
}

}  // namespace

void bind_closing_tree(nb::module_& m) {
    m.def("closing_tree", &tree_of, "rules"_a, "starts"_a, "kinds"_a, "rewritten"_a,
          "A language as `closing_program` takes it: the rules' nodes, the starts', then the nodes, parts first. "
          "`kinds`: by the class of an expression. `rewritten` says what an intersection is written as.");
}

}  // namespace tureen
